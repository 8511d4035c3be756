"""The ledger's only writer: records in, one fenced transaction out. Must not read for reports, nor decide. Read top-down:

writer        the thread: many submissions, one transaction, one acknowledgement
transaction   who may write (generations), and moves that are logged first
batches       a transaction's records as batches of one kind; chunks
statements    each kind's SQL, over one record
batch_sql     the same SQL over many records at once
compaction    chunks of final samples, joined or dropped
wal           SQLite's write-ahead log
"""
