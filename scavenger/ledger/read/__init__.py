"""Reads of the ledger: what a restarted daemon needs, reports, tokens of a sample. Writes nothing.

Read `reader.py` first.
"""
