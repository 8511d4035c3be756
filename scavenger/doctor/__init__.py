"""What a site's Slurm settings mean for harvesting: findings, each with its remedy.

`collect` asks Slurm, `facts` parses, `rules` judge (pure), `probe` runs one small job on a compute node.
Read `rules/run.py` first.
"""
