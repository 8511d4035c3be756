"""The local backend: a small scheduler in Slurm's terms over real processes on this machine.

`scheduler` is pure; `server` runs it, `client` asks it. Must not know Slurm's commands, nor what the jobs do.
Read `scheduler.py` first.
"""
