"""vLLM behind `rollout.engines.base.Engine`.

Owns everything that depends on a vLLM release. Must not know leases or the daemon. Read `engine.py` first.
"""
