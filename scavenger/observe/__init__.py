"""What the daemon says of itself: status file, metrics, logs.

Reads the other parts on the event loop and changes nothing. Read `status.py` first.
"""
