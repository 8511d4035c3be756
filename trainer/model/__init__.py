"""The learner on one rank: sharded model, attention, logprobs, adapters. Read `learner.py` first."""
