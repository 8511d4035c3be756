"""A cluster as seen from here: the model, the port and its backends.

`model` is Slurm's vocabulary as frozen dataclasses, `port` what every backend offers; `slurm` speaks through Slurm's commands,
`pyslurm` through its library in a process of its own, `local` is a small scheduler over real processes, and `sandbox` a private
real Slurm for demo and tests. Must not know harvest or router. Read `model.py` and `port.py` first.
"""
