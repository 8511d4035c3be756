"""What has become of each job that we intended, from one poll to the next. Pure.

Owns intents, observed job states, GPU allocations and the health of nodes.
Must not know demand or limits, nor call Slurm. Read `tracker.py` first.
"""
