"""The learner on one rank: sharded model, attention, adapters.

Owns weights, gradients and the optimizer. Must not know samples' origin, the daemon or Slurm. Read `learner.py` first.
"""
