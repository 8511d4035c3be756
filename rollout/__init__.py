"""The preemptible worker: one process, one engine. Must not know trainer or Slurm.

`worker` performs what the sans-IO session (`scavenger.protocol.worker`) decides; `engines` generate. Read `worker.py` first.
"""
