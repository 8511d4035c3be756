-- Engines that have not left, with the samples that each holds and the newest version that it generates with.
WITH held AS (
    SELECT l.worker_id, count(*) AS samples, CAST(sum(s.accepted_len) AS bigint) AS tokens, max(l.version) AS version
    FROM v_samples s
    JOIN v_leases l ON l.sample_id = s.sample_id AND l.epoch = s.epoch AND l.ended_at IS NULL
    WHERE s.state = 'open'
    GROUP BY l.worker_id
)
SELECT w.worker_id, w.run_id, r.name AS run, w.kind, w.place AS node, w.gpus, w.job_id, w.engine, w.slot, w.joined_at,
       COALESCE(h.samples, 0) AS samples, COALESCE(h.tokens, 0) AS tokens, h.version
FROM v_workers w
JOIN v_runs r ON r.run_id = w.run_id AND r.state = 'active'
LEFT JOIN held h ON h.worker_id = w.worker_id
WHERE w.left_at IS NULL
ORDER BY w.worker_id
LIMIT :most;
