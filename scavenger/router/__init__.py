"""Samples, leases, workers and runs: who generates what, and what was generated.

`core` is the state machine: events in, actions out, no IO. `edge` is the ZeroMQ socket, the ledger's writer and the token
store around it. Must not know Slurm or jobs' scripts. Read `core/machine.py` first.
"""
