-- Engines that left: why, with notice or without, and what became of the tokens that were in flight; the newest first.
-- What ended the allocation is the word on its last engine: one that was given up for lost and came back left while it had its GPUs.
SELECT w.worker_id, r.name AS run, w.kind, w.place AS node, w.job_id, w.left_at, w.reason, w.notice, w.samples, w.salvaged, w.regenerated,
       CASE WHEN w.worker_id = (SELECT max(worker_id) FROM v_workers x WHERE x.intent_id = h.intent_id AND x.incarnation = h.restart_count)
            THEN COALESCE(h.reason, '') ELSE '' END AS allocation_end
FROM (SELECT * FROM v_workers WHERE left_at IS NOT NULL ORDER BY left_at DESC LIMIT :most) w
JOIN v_runs r ON r.run_id = w.run_id
LEFT JOIN v_gpu_allocations h ON h.intent_id = w.intent_id AND h.restart_count = w.incarnation
ORDER BY w.left_at DESC;
