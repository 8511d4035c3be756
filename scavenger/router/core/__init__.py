"""The router's state machine: `handle(event, now)` gives the actions to perform. Pure.

Owns the tables of runs, groups, samples, leases and workers, and which transitions are legal. Knows no socket, no database and
no clock. Read `machine.py` first, then `state.py` (the rows) and `samples.py` (leases and chunks).
"""
