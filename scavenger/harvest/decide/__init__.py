"""Which jobs to submit, keep, drain and cancel. Pure: a cluster view in, a Decision with its reason out.

`decide` is the whole decision on one screen; each clause is a file: other users' demand, free capacity, start benefit,
standby jobs, draining, voluntary preemption, submission. Knows no command and no clock. Read `decide.py` first.
"""
