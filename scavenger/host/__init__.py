"""What this host gives a daemon: file descriptors, ports and disk space, and the one error for each that is missing.

Knows no part of the daemon. Read any: each is alone.
"""
