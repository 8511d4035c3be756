"""The harvester: which preemptible jobs to submit, keep and drain, and what became of them.

`harvester` is the loop: it polls Slurm (`poller`) as often as `pace` says, `track` follows our jobs from poll to poll, `decide` is the pure
decision, `execute` carries it out. Must not know tokens, samples or policies of routing.
Read `harvester.py` first, then `decide/decide.py`.
"""
