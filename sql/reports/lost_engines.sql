-- Which harvested engines were lost, with notice or none, and how many tokens of one sample had to be generated again at most?
-- The promise: none with notice, at most one flush interval (daemon.flush_tokens) of each sample without.
SELECT w.worker_id, r.name AS run, w.node, w.job_id, w.incarnation, COALESCE(NULLIF(h.reason, ''), 'not ended') AS allocation_end_reason,
       w.reason AS worker_end_reason, CASE WHEN w.notice THEN 'notice' ELSE 'none' END AS notice, w.samples AS samples_in_flight,
       w.salvaged AS tokens_salvaged, w.regenerated AS tokens_regenerated,
       COALESCE(l.most, 0) AS most_regenerated_of_one_sample,
       round(CAST(w.left_at - w.joined_at AS numeric), 1) AS lived_s
FROM v_workers w
JOIN v_runs r ON r.run_id = w.run_id
LEFT JOIN v_gpu_allocations h ON h.intent_id = w.intent_id AND h.restart_count = w.incarnation
LEFT JOIN (SELECT worker_id, max(regenerated) AS most FROM v_leases GROUP BY worker_id) l ON l.worker_id = w.worker_id
WHERE w.kind = 'harvested' AND w.left_at IS NOT NULL AND COALESCE(h.reason, '') NOT IN ('cancelled', 'completed', 'requeued')
  -- one that went on for another run was not lost
  AND NOT EXISTS (SELECT 1 FROM v_workers x WHERE x.intent_id = w.intent_id AND x.incarnation = w.incarnation AND x.run_id <> w.run_id
                  AND x.worker_id > w.worker_id)
ORDER BY w.left_at, w.worker_id;
