"""Data sets, prompts, micro-batches. Deterministic by seed and position.

Owns the order of prompts and what is held out. Must not know the daemon, the model's weights or rewards' values.
Read `prompts.py` first.
"""
