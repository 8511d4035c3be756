"""A rollout engine beside an inference service, on the service's own GPUs: what its owner starts as a step of the service's job.

Owns what the service's metrics mean, reading them, a proxy that sees each latency, and the process that hosts the engine. How many
samples that may generate is `policy/serving.py`'s to say. Must not know the router: the engine that it hosts talks to the daemon like
any other.
Read `metrics.py` first.
"""
