-- When the ledger was written last.
SELECT COALESCE(unix_s, 0) AS at FROM v_now;
