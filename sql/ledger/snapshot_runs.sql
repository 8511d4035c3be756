-- Every run, with the newest attempt's configuration and engine (the run's own before the first attempt). Ended ones may be resumed.
SELECT r.*, COALESCE(a.config, r.config) AS attempt_config, COALESCE(a.engine, r.engine) AS attempt_engine,
       COALESCE(a.job_id, 0) AS attempt_job_id
FROM runs r
LEFT JOIN attempts a ON a.run_id = r.run_id AND a.attempt = r.attempt
ORDER BY r.run_id;
