"""`scavenger demo`: a whole site on one machine, with other users who take GPUs back.

Read `session.py` first.
"""
