-- What else happened: refused chunks, an unreachable scheduler, quarantined nodes? (The newest; "bounds": how many, of which Unix seconds.)
WITH bounds AS (SELECT 1000 AS most, 0.0 AS since, 9999999999.0 AS until),
newest AS (
  SELECT * FROM v_events WHERE at >= (SELECT since FROM bounds) AND at < (SELECT until FROM bounds)
  ORDER BY id DESC LIMIT (SELECT most FROM bounds)
)
SELECT e.id, CAST(e.at AS bigint) AS at_unix_s, e.kind, COALESCE(r.name, '') AS run, e.subject, e.reason, e.detail
FROM newest e
LEFT JOIN v_runs r ON r.run_id = e.run_id
ORDER BY e.id;
