-- The first engines that had one sample, in order: from and to which length, and why each lease ended.
SELECT l.epoch, l.worker_id, COALESCE(w.kind, '') AS kind, COALESCE(w.place, '') AS node, COALESCE(w.job_id, 0) AS job_id, l.version,
       l.start_len, CASE WHEN l.ended_at IS NULL THEN s.accepted_len ELSE l.end_len END AS end_len, l.regenerated, l.reason, l.granted_at, l.ended_at
FROM v_leases l
JOIN v_samples s ON s.sample_id = l.sample_id
LEFT JOIN v_workers w ON w.worker_id = l.worker_id
WHERE l.sample_id = :sample_id
ORDER BY l.epoch
LIMIT :most;
