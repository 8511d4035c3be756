-- The run that was opened last.
SELECT * FROM runs ORDER BY run_id DESC LIMIT 1;
