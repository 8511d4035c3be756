"""One daemon: wires ledger, router and harvester together and runs them until it is stopped.

Owns start, takeover of the ledger from another daemon, reload, the service manager and shutdown. Must not decide what is
harvested (`scavenger.harvest.decide`) or who generates what (`scavenger.router.core`).
Read `main.py` first, then `ownership.py` (who may write the ledger).
"""
