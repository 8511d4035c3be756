"""Slurm through small processes of other Unix users, so that the daemon shares no uid with engines and has no right over others' jobs.

Owns the sockets between the daemon and these processes, and what each of them does and refuses. Must not know why a job is submitted.
Read `messages` first, then `server`.
"""
