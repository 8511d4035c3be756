"""A recorded run, simulated again with the live code.

Owns the fit of machines to a recording and the comparison with it. Must not know how a ledger is stored: it is handed a history.
Read `replay.py` first.
"""
