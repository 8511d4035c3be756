-- Which harvested jobs never generated a token, how far did they get, what did that cost, and why did they end?
-- One row for each ended allocation without a token, and for each ended job that never had a GPU (it cost nothing).
WITH engines AS (
    SELECT w.intent_id, w.incarnation, count(DISTINCT w.worker_id) AS engines, count(l.sample_id) AS leases, max(w.reason) AS worker_end_reason,
           COALESCE(max(CASE WHEN l.ended_at IS NULL THEN s.accepted_len ELSE l.end_len END - l.start_len), 0) AS most_tokens
    FROM v_workers w
    LEFT JOIN v_leases l ON l.worker_id = w.worker_id
    LEFT JOIN v_samples s ON s.sample_id = l.sample_id
    WHERE w.kind = 'harvested'
    GROUP BY w.intent_id, w.incarnation
),
wasted AS (
    SELECT h.intent_id, h.job_id, h.restart_count, h.node, h.gpus, h.ended_at, h.ended_at - h.started_at AS allocated_s, h.reason AS allocation_end_reason,
           COALESCE(e.worker_end_reason, '') AS worker_end_reason,
           CASE WHEN e.engines IS NULL THEN 'had GPUs, no engine joined' WHEN e.leases = 0 THEN 'engine joined, got no sample'
                ELSE 'engine got samples, generated no token' END AS furthest_stage
    FROM v_gpu_allocations h
    LEFT JOIN engines e ON e.intent_id = h.intent_id AND e.incarnation = h.restart_count
    WHERE h.ended_at IS NOT NULL AND COALESCE(e.most_tokens, 0) = 0
    UNION ALL
    SELECT j.intent_id, j.job_id, j.restart_count, '', j.gpus, j.ended_at, 0.0, '', '', CASE WHEN j.job_id = 0 THEN 'never submitted' ELSE 'never started' END
    FROM v_jobs j
    WHERE j.kind = 'engine' AND j.ended_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM v_gpu_allocations h WHERE h.intent_id = j.intent_id)
)
SELECT round(CAST(w.ended_at AS numeric), 1) AS ended_unix_s, COALESCE(r.name, '') AS run, COALESCE(r.owner, '') AS owner, w.job_id,
       w.restart_count, w.node, w.gpus, round(CAST(w.allocated_s AS numeric), 1) AS allocated_s,
       round(CAST(w.gpus * w.allocated_s AS numeric), 1) AS gpu_seconds, w.furthest_stage, w.allocation_end_reason, w.worker_end_reason,
       COALESCE(j.reason, '') AS job_reason
FROM wasted w
LEFT JOIN v_jobs j ON j.intent_id = w.intent_id
LEFT JOIN v_runs r ON r.run_id = j.run_id
ORDER BY w.ended_at, w.job_id, w.restart_count;
