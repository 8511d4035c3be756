"""What decides for a run: placement, migration, the seed window, the size of its fleet, and the forecasts they use.

Pure: a view in, an answer with its reason out. Lies below the router, which asks it, and the harvester, which reads its
demand: it must not know either.
Read `interface.py` first (the questions and what may be known), then `predictive/policy.py` (our answers).
"""
