"""The durable record of everything: runs, tokens, jobs, allocations, decisions. SQLite or PostgreSQL.

`write` is the only writer (group commit, fenced), `read` answers questions, `maintain` keeps it small and safe; `schema` has the
tables. Must not know a socket, nor decide about samples. Read `schema.py` first, then `write/writer.py`.
"""
