"""A recorded run, simulated again with the live code. Read `replay.py` first."""
