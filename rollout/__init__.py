"""The preemptible worker: one process, one engine. Must not know trainer or Slurm's commands.

`worker` performs what the sans-IO session (`scavenger.protocol.worker`) decides; `engines` generate. Read `worker.py` first. An engine over
several nodes has a process on each: the worker on the first, `headless` on the others; `nodes` and `node_link` hold them together.
"""
