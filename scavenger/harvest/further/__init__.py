"""The harvester of a further cluster, which dials out to the daemon, and the daemon's end of that link. Owns what crosses it.

The daemon's own harvest session decides for every cluster; what asks Slurm for it on a further one is a process there, as
`cluster.proxy`'s are on its own, whose messages these are too. So ledger, router and decisions stay in one place and need no second
protocol of their own, no cluster opens a port inward, and a link that is down is a Slurm that does not answer: I1-I12 hold as they do then.
Read `messages` first, then `link` (the daemon's end) and `process` (the other one).
"""
