"""Slurm through pyslurm, which runs in a process of its own: it freezes and exits its interpreter.

`client` is the daemon's side, `process` the only module that imports pyslurm. Must not
know harvest or router; it submits nothing itself: that goes through `slurm`. Read `client.py` first.
"""
