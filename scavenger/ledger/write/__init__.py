"""The ledger's only writer: records in, one fenced transaction out. Must not read for reports, nor decide. Read top-down:

writer        the thread: many submissions, one transaction, one acknowledgement
transaction   who may write (generations)
moves         moves of many samples: logged first, folded later
batches       a transaction's records as batches of one kind; chunks
statements    each kind's SQL, over one record
batch_sql     the same SQL over many records at once
sql_page      writes sql/ledger/writes.sql, where all of that SQL can be read
compaction    chunks of final samples, joined or dropped
wal           SQLite's write-ahead log
"""
