"""A private, throw-away, real Slurm on one machine, as the current user.

Owns its daemons, ports and files, and ends them. Must not know a site's Slurm, nor harvest, router or ledger.
Read `sandbox.py` first; `conf` builds the configuration text.
"""
