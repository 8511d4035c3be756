"""The `scavenger` command, one file a command group. Owns arguments and printing. Must not decide.

Each command calls one function of the part that does the work. `main` assembles the groups; `options` holds what they share.
Read `main.py` first.
"""
