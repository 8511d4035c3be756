"""Backups, retention, purges, exports and vacuum of a ledger.

Read `backup.py` first; what may be dropped is decided in `ledger/retention.py` (pure).
"""
