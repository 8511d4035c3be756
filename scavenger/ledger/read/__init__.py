"""Reads of the ledger: a restarted daemon's snapshot, reports, the tokens of a sample. Writes nothing.

Read `reader.py` first.
"""
