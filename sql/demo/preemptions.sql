-- What each lost engine had in flight: samples, tokens salvaged, tokens generated again, and whether it had notice.
SELECT w.left_at, w.node, w.job_id, w.notice, w.reason, w.samples, w.salvaged, w.regenerated
FROM workers w LEFT JOIN gpu_allocations h ON h.intent_id = w.intent_id AND h.restart_count = w.incarnation
WHERE w.left_at IS NOT NULL AND w.kind = 'harvested' AND coalesce(h.reason, '') NOT IN ('cancelled', 'completed', 'requeued')
ORDER BY w.left_at
