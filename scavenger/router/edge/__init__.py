"""The router's edge: bytes in, checked message, event to the core, actions out, bytes out.

Owns the ROUTER socket under CURVE and the order of messages while tokens are read back from the ledger.
Must not decide about samples or leases: the core does.
Read `server.py` first, then `pipeline.py`.
"""
