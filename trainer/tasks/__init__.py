"""The built-in task: sorting six digits. Needs no data set. Must not know torch, nor how a run is trained. Read `sort.py`."""
