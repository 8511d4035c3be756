-- What else happened: refused chunks, an unreachable scheduler, quarantined nodes?
SELECT e.id, CAST(e.at AS bigint) AS at_unix_s, e.kind, COALESCE(r.name, '') AS run, e.subject, e.reason, e.detail
FROM v_events e
LEFT JOIN v_runs r ON r.run_id = e.run_id
ORDER BY e.id;
