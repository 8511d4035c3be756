-- GPUs by owner at the newest poll of the daemon's own cluster.
SELECT at, gpus_idle, gpus_harvested, gpus_other_users, gpus_reserved, gpus_unusable, jobs_pending_other_users
FROM v_cluster_polls
WHERE cluster = ''
ORDER BY at DESC
LIMIT 1;
