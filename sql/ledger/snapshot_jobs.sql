-- Open job intents, each with its newest allocation, and the times it was known to hold no GPUs: that allocation's end, and its last
-- PENDING poll.
SELECT j.*, h.intent_id IS NOT NULL AND h.ended_at IS NULL AS allocation_open, COALESCE(h.restart_count, -1) AS last_allocation,
       CASE WHEN h.ended_at IS NULL THEN h.node END AS allocation_node, CASE WHEN h.ended_at IS NULL THEN h.started_at END AS allocated_since,
       COALESCE(h.ended_at, 0.0) AS allocation_ended_at, CASE WHEN j.last_state = 'PENDING' THEN j.observed_at END AS waited_at,
       (SELECT max(c.at) FROM cluster_polls c WHERE c.cluster = j.cluster) AS polled_at,
       (SELECT max(r.until_at) FROM job_runs r WHERE r.intent_id = j.intent_id) AS run_since
FROM jobs j
LEFT JOIN gpu_allocations h ON h.intent_id = j.intent_id
     AND h.restart_count = (SELECT max(n.restart_count) FROM gpu_allocations n WHERE n.intent_id = j.intent_id)
WHERE j.ended_at IS NULL
ORDER BY j.intended_at, j.intent_id;
