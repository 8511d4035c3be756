"""Checkpoints: written beside the training, read at a resume. Read `checkpoint.py` first."""
