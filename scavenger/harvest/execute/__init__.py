"""Performs what was decided: intents made durable, job scripts written, jobs submitted, drained and cancelled.

Must not decide: an action comes with its reason. Read `execute.py` first.
"""
