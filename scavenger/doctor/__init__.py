"""What a site's Slurm settings mean for harvesting: findings, each with its remedy.

`collect` asks Slurm, `facts` parses, `rules` judge (pure), `probe` runs one small job on a compute node,
`canary` harvests one engine.
Owns the findings and the remedies. Must not change a setting, read a ledger or know a running daemon.
Read `rules/run.py` first.
"""
