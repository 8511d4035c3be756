-- How many harvested engines were lost, by what ended their allocation and by notice, and what did that cost?
SELECT COALESCE(NULLIF(h.reason, ''), 'not ended') AS allocation_end_reason, CASE WHEN w.notice THEN 'notice' ELSE 'none' END AS notice,
       count(*) AS engines, CAST(sum(w.samples) AS bigint) AS samples_in_flight,
       CAST(sum(w.salvaged) AS bigint) AS tokens_salvaged, CAST(sum(w.regenerated) AS bigint) AS tokens_regenerated,
       COALESCE(max(l.most), 0) AS most_regenerated_of_one_sample
FROM v_workers w
LEFT JOIN v_gpu_allocations h ON h.intent_id = w.intent_id AND h.restart_count = w.incarnation
LEFT JOIN (SELECT worker_id, max(regenerated) AS most FROM v_leases GROUP BY worker_id) l ON l.worker_id = w.worker_id
WHERE w.kind = 'harvested' AND w.left_at IS NOT NULL AND COALESCE(h.reason, '') NOT IN ('cancelled', 'completed', 'requeued')
  -- one that went on for another run was not lost
  AND NOT EXISTS (SELECT 1 FROM v_workers x WHERE x.intent_id = w.intent_id AND x.incarnation = w.incarnation AND x.run_id <> w.run_id
                  AND x.worker_id > w.worker_id)
GROUP BY COALESCE(NULLIF(h.reason, ''), 'not ended'), CASE WHEN w.notice THEN 'notice' ELSE 'none' END
ORDER BY allocation_end_reason, notice;
