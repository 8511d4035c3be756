"""The run on rank 0 and what it asks of all ranks: steps, publishing, metrics, watchdog.

Decides nothing of a step itself: it drives `scavenger.protocol.train_step`. Read `run.py` first.
"""
