-- The leases on samples of a run's training steps after `after_step` - which worker had which sample, from when to when.
SELECT l.sample_id, l.epoch, l.worker_id, l.start_len, l.end_len, l.granted_at, l.ended_at
FROM groups g
JOIN samples s ON s.group_id = g.group_id
JOIN leases l ON l.sample_id = s.sample_id
WHERE g.run_id = :run_id AND g.purpose = 'train' AND g.step > :after_step
ORDER BY l.granted_at, l.sample_id, l.epoch;
