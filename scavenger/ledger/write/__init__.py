"""The ledger's only writer: records in, one fenced transaction out.

Read `writer.py` first (the thread and its group commit), then `transaction.py` (the fence) and `statements.py` (record to SQL).
"""
