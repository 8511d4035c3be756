"""Slurm through its commands. `commands`, `text` and `json_output` are pure; `runner` alone starts a process.

Owns how Slurm is asked and how its output is read. Must not know why: no harvest, no run, no ledger.
Read `backend.py` first.
"""
