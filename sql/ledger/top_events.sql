-- The newest events, without that of every engine that loaded a version; the newest first.
SELECT e.id, e.at, e.kind, COALESCE(r.name, '') AS run, e.subject, e.reason
FROM (SELECT * FROM v_events ORDER BY id DESC LIMIT 2000) e
LEFT JOIN v_runs r ON r.run_id = e.run_id
WHERE e.kind <> 'weights_loaded'
ORDER BY e.id DESC
LIMIT :most;
