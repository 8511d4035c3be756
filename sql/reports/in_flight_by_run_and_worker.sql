-- What is in flight now, by run and worker: samples and tokens that are not complete? (No worker: waiting for one.)
SELECT r.name AS run, l.worker_id, w.kind, w.node, w.job_id, count(*) AS samples,
       CAST(sum(s.accepted_len) AS bigint) AS accepted_tokens, max(s.moves) AS most_moves
FROM v_samples s
JOIN v_runs r ON r.run_id = s.run_id AND r.state = 'active'
LEFT JOIN v_leases l ON l.sample_id = s.sample_id AND l.epoch = s.epoch AND l.ended_at IS NULL
LEFT JOIN v_workers w ON w.worker_id = l.worker_id
WHERE s.state = 'open'
GROUP BY r.name, l.worker_id, w.kind, w.node, w.job_id
ORDER BY r.name, samples DESC, l.worker_id;
