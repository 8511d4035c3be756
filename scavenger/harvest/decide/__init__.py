"""Which jobs to submit, keep, drain and cancel. Pure: a cluster view in, a Decision with its reason out.

`decide` is the whole decision on one screen; what a clause needs is a file: other users' demand, free capacity with
start benefits, standby jobs, draining, voluntary preemption. Must not know a command, a clock
or the ledger. Read `decide.py` first.
"""
