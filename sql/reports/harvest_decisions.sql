-- Which jobs were submitted, kept pending, drained or cancelled, when and why? (The newest; "bounds": how many, of which Unix seconds.)
-- What decisions_with_reasons has, but of the harvester alone: no placement, no window. "none": nothing was done, and why; logged once while
-- the reason stays the same. "subject" is the job's name in Slurm; job_id and node are the last that it had.
WITH bounds AS (SELECT 1000 AS most, 0.0 AS since, 9999999999.0 AS until),
newest AS (
  SELECT * FROM v_decisions WHERE policy = 'harvest' AND at >= (SELECT since FROM bounds) AND at < (SELECT until FROM bounds)
  ORDER BY id DESC LIMIT (SELECT most FROM bounds)
)
SELECT d.id, CAST(d.at AS bigint) AS at_unix_s, d.action, d.subject, j.job_id, j.node, d.code, d.reason, d.cluster
FROM newest d
LEFT JOIN v_jobs j ON j.intent_id = d.subject
ORDER BY d.id;
