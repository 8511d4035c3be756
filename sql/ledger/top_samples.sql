-- A run's samples that are not final, those that moved and the longest first; then those that a step used.
WITH chosen AS (
    SELECT * FROM (
        SELECT sample_id, 0 AS final FROM v_samples WHERE run_id = :run_id AND state IN ('open', 'complete')
        ORDER BY moves DESC, accepted_len DESC, sample_id LIMIT :most
    ) AS flying
    UNION ALL
    SELECT * FROM (
        SELECT sample_id, 1 AS final FROM v_samples
        WHERE run_id = :run_id AND state IN ('consumed', 'filtered', 'masked') AND ended_step = :step
        ORDER BY moves DESC, accepted_len DESC, sample_id LIMIT :most
    ) AS used
)
SELECT s.sample_id, r.name AS run, g.step, g.prompt_index, s.state, s.accepted_len, s.moves, s.reward, l.worker_id, w.place AS node
FROM chosen c
JOIN v_samples s ON s.sample_id = c.sample_id
JOIN v_groups g ON g.group_id = s.group_id
JOIN v_runs r ON r.run_id = s.run_id
LEFT JOIN v_leases l ON l.sample_id = s.sample_id AND l.epoch = s.epoch AND l.ended_at IS NULL
LEFT JOIN v_workers w ON w.worker_id = l.worker_id
ORDER BY c.final, s.moves DESC, s.accepted_len DESC, s.sample_id
LIMIT :most;
