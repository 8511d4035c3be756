"""The control plane: daemon, router, ledger, cluster and client. Must not know torch or the packages it starts."""

__version__ = "0.2.0"
