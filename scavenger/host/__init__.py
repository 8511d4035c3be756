"""What this host gives a daemon: file descriptors, ports and disk space, and the one error for each that is missing.

Must not know any part of the daemon. Read any: each is alone.
"""
