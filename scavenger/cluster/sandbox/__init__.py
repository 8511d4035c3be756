"""A private, throw-away, real Slurm on one machine, as the current user.

Read `sandbox.py` first; `conf` builds the configuration text.
"""
