-- The run's engines that were there after a time - their lives, and how Slurm ended those that were harvested.
SELECT w.worker_id, w.kind, w.intent_id, w.incarnation, w.node, w.gpus, w.joined_at, w.left_at, w.reason, w.notice, h.reason AS allocation_reason
FROM workers w
LEFT JOIN gpu_allocations h ON h.intent_id = w.intent_id AND h.restart_count = w.incarnation
    -- how its allocation ended says nothing of one that went on for another run
    AND NOT EXISTS (SELECT 1 FROM workers x WHERE x.intent_id = w.intent_id AND x.incarnation = w.incarnation AND x.run_id <> w.run_id
                    AND x.worker_id > w.worker_id)
WHERE w.run_id = :run_id AND (w.left_at IS NULL OR w.left_at >= :since)
ORDER BY w.worker_id;
