"""What the daemon says of itself: status file, metrics, logs.

Owns what admins see of a running daemon. Reads the other parts on the event loop.
Must not change them, nor wait for them. Read `status.py` first.
"""
