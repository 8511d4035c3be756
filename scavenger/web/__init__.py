"""`scavenger web`: runs, steps, samples and decisions of the ledger as web pages. Writes no ledger and asks Slurm nothing.

    ledger  --questions-->  rows  --pages, steps-->  Page (panels)  --render-->  HTML  --app-->  a browser;  --export-->  one file

Owns what is shown, and who may see it. `questions` is the SQL and `charts` the geometry, both pure; `texts` makes text of token ids in a
process of its own; only `app` and `connections` know starlette and uvicorn, the extra `web`. Read `pages.py` first.
"""
