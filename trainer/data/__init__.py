"""Prompts, chat templates, micro-batches. Deterministic by seed and position. Read `prompts.py` first."""
