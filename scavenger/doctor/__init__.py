"""What a site's Slurm means for harvesting, finding by finding, with remedies.

`collect` asks Slurm, `facts` parses, `rules` judge (pure), `probe` runs one small job on a compute node.
Read `rules/run.py` first.
"""
