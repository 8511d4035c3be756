"""What a site's idle GPUs would give, from its accounting.

Owns the figures and their tables. Must not know a running daemon, nor ask Slurm: it reads dumps and traces. Read `survey.py` first.
"""
