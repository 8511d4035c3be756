"""The simulator: virtual time, cost models, fleets and lengths that drive the same core as the live daemon.

Owns the clock, the speeds and the queue of events; router, policies, the harvester's session, worker session and train step are the live
ones. Must not know torch, a socket or a real Slurm (`live.py` is handed a view), and holds no second version of a live rule.
`VirtualSlurm` shares no core with the local backend's scheduler (`cluster.local.scheduler`): that one schedules jobs of all users by tier
and priority, while a trace says of other users only how many GPUs of each node they leave idle. What a trace needs instead, the local
backend has no use for: nodes of several sizes, and the time that Slurm takes to start a job and to requeue one.
Its limits: Slurm's own scheduling and the network are models, and lengths are drawn or recorded (docs/simulate.md).
Read `driver.py` first (one play), then `site_cluster.py` (Slurm in virtual time).
"""
