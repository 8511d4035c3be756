-- How many harvested engines were lost, by what ended them and by notice, and what did that cost?
SELECT COALESCE(NULLIF(h.reason, ''), 'not ended') AS hold_ended, CASE WHEN w.notice THEN 'notice' ELSE 'none' END AS notice,
       count(*) AS engines, CAST(sum(w.samples) AS bigint) AS samples_in_flight,
       CAST(sum(w.salvaged) AS bigint) AS tokens_salvaged, CAST(sum(w.regenerated) AS bigint) AS tokens_regenerated,
       COALESCE(max((SELECT max(l.regenerated) FROM v_leases l WHERE l.worker_id = w.worker_id)), 0) AS most_regenerated_of_one_sample
FROM v_workers w
LEFT JOIN v_holds h ON h.intent_id = w.intent_id AND h.restart_count = w.incarnation
WHERE w.kind = 'harvested' AND w.left_at IS NOT NULL AND COALESCE(h.reason, '') NOT IN ('cancelled', 'completed', 'requeued')
GROUP BY COALESCE(NULLIF(h.reason, ''), 'not ended'), CASE WHEN w.notice THEN 'notice' ELSE 'none' END
ORDER BY hold_ended, notice;
