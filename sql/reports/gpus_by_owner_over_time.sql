-- Who had the GPUs at each poll of the cluster? (The newest; "bounds": how many, of which Unix seconds.)
WITH bounds AS (SELECT 1000 AS most, 0.0 AS since, 9999999999.0 AS until),
newest AS (
  SELECT * FROM v_cluster_polls WHERE at >= (SELECT since FROM bounds) AND at < (SELECT until FROM bounds)
  ORDER BY id DESC LIMIT (SELECT most FROM bounds)
)
SELECT round(CAST(at AS numeric), 1) AS at_unix_s, gpus_idle, gpus_harvested, gpus_other_users, gpus_reserved, gpus_unusable,
       jobs_pending_other_users, cluster
FROM newest
ORDER BY id;
