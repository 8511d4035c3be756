"""The local backend: a small scheduler in Slurm's terms over real processes on this machine.

`scheduler` is pure; `server` runs it, `client` asks it. Read `scheduler.py` first.
"""
