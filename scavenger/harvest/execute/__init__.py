"""What the session's commands take beside Slurm: job scripts, workers' keys, jobs' logs.

Must not decide: an action comes with its reason. Read `edges.py` first.
"""
