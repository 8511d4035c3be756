"""Slurm through its commands. `commands`, `text` and `json_output` are pure; `runner` alone starts a process.

Read `backend.py` first.
"""
