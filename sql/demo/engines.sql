-- The engines that generated some samples, one after another, and which tokens each gave.
SELECT l.sample_id, w.kind, w.node, l.start_len, l.end_len
FROM leases l JOIN workers w ON w.worker_id = l.worker_id
WHERE l.sample_id IN :sample_ids
ORDER BY l.sample_id, l.epoch
