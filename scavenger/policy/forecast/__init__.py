"""Forecasts: completion lengths, speeds of engines and trainer, the rest of a step, GPU survival. Pure.

Each learns from facts alone and predicts. Must not decide, nor know a view of the run. Read `step.py` first: it puts the others together.
"""
