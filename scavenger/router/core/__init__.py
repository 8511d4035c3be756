"""The router's state machine: `handle(event, now)` gives the actions to perform. Pure.

Owns the tables of runs, groups, samples, leases and workers, and which transitions are legal. Must not know a socket, a
database or a clock. Read `machine.py` first, then `state.py` (the rows) and `samples.py` (leases and chunks).
"""
