"""The harvester: which preemptible jobs to submit, keep and drain, and what became of them.

`driver` polls Slurm, as often as `pace` says, `track` follows our jobs from poll to poll, `decide` is the pure decision, `execute` runs it;
`harvester` is the loop over the four. Knows no token. Read `harvester.py` first, then `decide/decide.py`.
"""
