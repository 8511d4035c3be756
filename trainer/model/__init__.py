"""The learner on one rank: sharded model, attention, adapters. Read `learner.py` first."""
