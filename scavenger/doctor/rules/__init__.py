"""The checks of a site. Pure: facts in, one finding each. Read `run.py` first."""
