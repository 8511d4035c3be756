"""The run on rank 0 and what it asks of all ranks: steps, publishing, metrics, watchdog.

Must not decide about a step itself: it drives `scavenger.protocol.train_step`. Read `run.py` first.
"""
