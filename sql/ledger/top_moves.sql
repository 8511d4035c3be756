-- Samples of a run's newest steps that lost their engine: with how many tokens, and where each went on; the newest first.
-- No engine to go on at: it waits, or has ended since.
SELECT s.sample_id, g.step, s.state, l.worker_id AS from_worker, l.reason, l.end_len AS kept_len, l.regenerated, l.ended_at AS at,
       COALESCE(n.worker_id, 0) AS to_worker, w.place AS to_node
FROM v_groups g
JOIN v_samples s ON s.group_id = g.group_id AND (s.epoch > 1 OR s.state = 'open')
JOIN v_leases l ON l.sample_id = s.sample_id AND l.ended_at IS NOT NULL AND (l.epoch < s.epoch OR s.state = 'open')
LEFT JOIN v_leases n ON n.sample_id = l.sample_id AND n.epoch = l.epoch + 1
LEFT JOIN v_workers w ON w.worker_id = n.worker_id
WHERE g.run_id = :run_id AND g.purpose = 'train' AND g.step >= :since_step
ORDER BY l.ended_at DESC, s.sample_id
LIMIT :most;
