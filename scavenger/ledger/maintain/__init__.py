"""Backups, retention, purges, exports and vacuum of a ledger.

Owns the work that no run waits for. Must not know a run's samples in memory: it sees rows only.
Read `backup.py` first; what may be dropped is decided in `ledger/retention.py` (pure).
"""
