"""The harvester: which preemptible jobs to submit, keep and drain, and what became of them.

`harvester` is the loop: it polls Slurm as often as `pace` says, and does what `session` orders: sans-IO, with `track` (our jobs
from poll to poll) and `decide` (the decision) below it. `execute` has the job script, the keys and the logs. The simulator drives the same
session. Must not know tokens, samples or policies of routing. Read `harvester.py` first, then `session.py` and `decide/decide.py`.
"""
