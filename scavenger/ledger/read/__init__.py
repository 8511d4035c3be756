"""Reads of the ledger: a restarted daemon's snapshot, reports, the tokens of a sample. Must not write.

Read `reader.py` first.
"""
