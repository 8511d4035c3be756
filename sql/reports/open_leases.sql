-- Which leases are open now: of which sample, at which engine, since when, and when did its last tokens come?
-- "Now" is the ledger's last commit. The oldest lease comes first.
SELECT r.name AS run, l.sample_id, l.epoch, l.version, l.worker_id, w.kind, w.node, w.job_id, l.start_len AS tokens_when_granted,
       s.accepted_len AS accepted_tokens, round(CAST(l.granted_at AS numeric), 1) AS granted_unix_s,
       round(CAST(n.unix_s - l.granted_at AS numeric), 1) AS lease_age_s,
       round(CAST((SELECT max(c.at) FROM v_chunks c WHERE c.sample_id = l.sample_id AND c.epoch = l.epoch) AS numeric), 1)
           AS last_tokens_unix_s
FROM v_samples s
JOIN v_leases l ON l.sample_id = s.sample_id AND l.epoch = s.epoch AND l.ended_at IS NULL
JOIN v_runs r ON r.run_id = s.run_id
CROSS JOIN v_now n
LEFT JOIN v_workers w ON w.worker_id = l.worker_id
WHERE s.state = 'open'
ORDER BY l.granted_at, l.sample_id;
