"""The preemptible worker: one process, one engine. Knows neither trainer nor Slurm.

`worker` performs what the sans-IO session (`scavenger.protocol.worker`) decides; `engines` generate. Read `worker.py` first.
"""
