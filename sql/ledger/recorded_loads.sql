-- When the run's engines had which weights, after a time. The subject is "worker N", the reason "version N".
SELECT subject, reason, detail, at
FROM events
WHERE kind = 'weights_loaded' AND run_id = :run_id AND at >= :since
ORDER BY id;
