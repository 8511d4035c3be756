-- The newest harvested allocations of a cluster's node, the newest first.
SELECT a.job_id, a.restart_count, a.gpus, a.started_at, a.ended_at, a.reason
FROM v_gpu_allocations a
LEFT JOIN v_jobs j ON j.intent_id = a.intent_id
WHERE a.node = :node AND COALESCE(j.cluster, '') = :cluster
ORDER BY a.started_at DESC
LIMIT :most;
