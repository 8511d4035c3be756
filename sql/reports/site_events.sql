-- What happened to the site: Slurm away, harvesting stopped, quarantined nodes, a refused partition? (The newest; "bounds": how many, of which Unix seconds.)
-- What `events` has, without the event of every engine that loaded a version of the weights, which is most of it.
WITH bounds AS (SELECT 1000 AS most, 0.0 AS since, 9999999999.0 AS until),
newest AS (
  SELECT * FROM v_events WHERE kind <> 'weights_loaded' AND at >= (SELECT since FROM bounds) AND at < (SELECT until FROM bounds)
  ORDER BY id DESC LIMIT (SELECT most FROM bounds)
)
SELECT e.id, CAST(e.at AS bigint) AS at_unix_s, e.kind, COALESCE(r.name, '') AS run, e.subject, e.reason, e.detail
FROM newest e
LEFT JOIN v_runs r ON r.run_id = e.run_id
ORDER BY e.id;
