"""A feasible schedule by a policy that knows every length, engine and loss beforehand: a bound to compare with.

Read `policy.py` first.
"""
