-- A node's newest harvested allocations, the newest first.
SELECT job_id, restart_count, gpus, started_at, ended_at, reason FROM v_gpu_allocations
WHERE node = :node
ORDER BY started_at DESC
LIMIT :most;
