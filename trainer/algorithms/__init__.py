"""The field's policy-gradient algorithms. `rows` declares each one; the other modules are the pure functions that rows are made of.

Read `rows.py` first, then `loss.py`.
"""
