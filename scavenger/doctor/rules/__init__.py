"""The checks of a site. Pure: facts in, one finding each.

Owns what a setting means for harvesting. Must not know how Slurm was asked (`doctor/collect.py`). Read `run.py` first.
"""
