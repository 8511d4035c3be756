"""When the cluster is polled, at how much of it, and what a failed poll means.

`pace` decides (pure), `polls` asks. Read `pace.py` first.
"""
