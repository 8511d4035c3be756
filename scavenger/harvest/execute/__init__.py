"""Performs what was decided: intents made durable, job scripts written, jobs submitted, drained and cancelled.

Decides nothing. Read `execute.py` first.
"""
