"""vLLM behind `rollout.engines.base.Engine`. Read `engine.py` first."""
