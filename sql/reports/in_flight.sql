-- What is in flight now, by run, node and job: samples and tokens that are not complete? (No node: waiting for an engine.)
-- "Now" is the ledger's last commit; a lease's age is in seconds.
SELECT r.name AS run, r.owner, COALESCE(w.kind, 'waiting') AS kind, COALESCE(w.node, '') AS node, w.job_id,
       count(DISTINCT w.worker_id) AS engines, count(*) AS samples, CAST(sum(s.accepted_len) AS bigint) AS accepted_tokens,
       round(CAST(max(n.unix_s - l.granted_at) AS numeric), 1) AS oldest_lease_s, max(s.moves) AS most_moves
FROM v_samples s
JOIN v_runs r ON r.run_id = s.run_id AND r.state = 'active'
CROSS JOIN v_now n
LEFT JOIN v_leases l ON l.sample_id = s.sample_id AND l.epoch = s.epoch AND l.ended_at IS NULL
LEFT JOIN v_workers w ON w.worker_id = l.worker_id
WHERE s.state = 'open'
GROUP BY r.name, r.owner, w.kind, w.node, w.job_id
ORDER BY r.name, CASE WHEN w.node IS NULL THEN 1 ELSE 0 END, w.node, w.job_id, w.kind;
