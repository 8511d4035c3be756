"""Data sets, prompts, micro-batches. Deterministic by seed and position. Read `prompts.py` first."""
