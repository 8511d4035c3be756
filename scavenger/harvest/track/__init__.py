"""What has become of each job that we intended, from one poll to the next. Pure.

Owns intents, observed job states, GPU allocations and the health of nodes. Read `tracker.py` first.
"""
