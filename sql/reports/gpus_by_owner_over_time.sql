-- Who had the GPUs at each observation of the cluster?
SELECT round(CAST(at AS numeric), 1) AS at_unix_s, idle, harvested, others, reserved, unusable, pending_others
FROM v_cluster_samples
ORDER BY at, id;
