"""The simulator: virtual time, cost models, fleets and lengths that drive the same core as the live daemon.

Owns the clock, the speeds and the queue of events; router, policies, harvester's tracker, worker session and train step are the live
ones. Must not know torch, a socket or a real Slurm (`live.py` is handed a view), and holds no second version of a live rule.
Its limits: Slurm's own scheduling and the network are models, and lengths are drawn or recorded (docs/simulate.md).
Read `driver.py` first (one play), then `site_cluster.py` (Slurm in virtual time).
"""
