-- How long did each lost engine keep its GPUs after its last tokens, and did it leave by itself (notice) or was it killed (none)?
-- An engine that was given up for lost and came back to the same GPUs, or went on for another run, is there once, as it left in the end.
WITH last_tokens AS (SELECT worker_id, max(at) AS at FROM v_chunks GROUP BY worker_id)
SELECT w.worker_id, w.job_id, w.node, CASE WHEN w.notice THEN 'notice' ELSE 'none' END AS notice, h.reason AS allocation_end_reason,
       CAST(COALESCE(k.at, w.joined_at) AS double precision) AS last_tokens_unix_s,
       CAST(w.left_at AS double precision) AS left_unix_s, CAST(h.ended_at AS double precision) AS released_unix_s,
       round(CAST(h.ended_at - CASE WHEN w.notice THEN w.left_at ELSE COALESCE(k.at, w.joined_at) END AS numeric), 1) AS kept_s
FROM v_workers w
JOIN v_gpu_allocations h ON h.intent_id = w.intent_id AND h.restart_count = w.incarnation
LEFT JOIN last_tokens k ON k.worker_id = w.worker_id
WHERE w.worker_id = (SELECT max(worker_id) FROM v_workers x WHERE x.intent_id = h.intent_id AND x.incarnation = h.restart_count)
  AND w.kind = 'harvested' AND w.left_at IS NOT NULL AND h.ended_at IS NOT NULL AND h.reason NOT IN ('cancelled', 'completed', 'requeued')
ORDER BY w.left_at, w.worker_id;
