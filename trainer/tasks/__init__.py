"""The built-in task: sorting six digits. It needs no data set and no torch. Read `sort.py`."""
