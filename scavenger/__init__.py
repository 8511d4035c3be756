"""The control plane: daemon, router, ledger, cluster and client. Imports neither torch nor the packages it starts."""

__version__ = "0.2.0"
