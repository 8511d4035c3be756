-- Every run, with the newest attempt's configuration.
SELECT r.run_id, r.attempt, r.last_step, COALESCE(a.config, r.config) AS config
FROM runs r
LEFT JOIN attempts a ON a.run_id = r.run_id AND a.attempt = r.attempt
ORDER BY r.run_id;
