"""`scavenger top`: what the daemon's status and the ledger say now, on one terminal. Asks Slurm nothing and writes no ledger.

    status.json, ledger  --feed-->  Inputs  --view-->  View  --text-->  lines, cells  --app-->  the terminal
                                                         '---------------------------> --once --json

Owns what is shown and how. `view` and `text` are pure, `recorded` feeds them without a daemon; only `app` knows Textual, an extra. Draining
is `harvest.limits`'s. Read `view.py` first.
"""
