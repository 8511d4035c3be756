"""`scavenger demo`: a whole site on one machine, with other users who take GPUs back.

Owns the private cluster, the other users' jobs and the report. Must not change how daemon, engines or trainer work: it starts them
as a site does. Read `session.py` first.
"""
