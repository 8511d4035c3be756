"""The field's policy-gradient algorithms. `rows` declares each one; the other modules are the pure functions that rows are made of.

Must not know ranks, the daemon or checkpoints. Read `rows.py` first, then `loss.py`.
"""
