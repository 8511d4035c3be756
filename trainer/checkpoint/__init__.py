"""Checkpoints: written beside the training, read at a resume.

Owns the files of a step and which of them stay. Must not know what the values mean to the model. Read `checkpoint.py` first.
"""
