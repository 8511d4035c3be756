-- Which samples stall: leased, or taken from their engine, without a new token for more than 120 seconds?
-- "Now" is the ledger's last commit, because the two databases share no clock. A sample that was never leased only waits its turn
-- and is not listed; "silent_s" counts from the newest of its last token, its lease and the end of its last lease.
WITH rules (most_silent_s) AS (SELECT 120),
flying AS (
    SELECT s.sample_id, s.run_id, s.accepted_len, s.epoch, s.moves, l.worker_id, l.ended_at, l.reason,
           COALESCE(l.ended_at, l.granted_at) AS leased_at,
           COALESCE((SELECT max(c.at) FROM v_chunks c WHERE c.sample_id = s.sample_id), l.granted_at) AS last_tokens_at
    FROM v_samples s
    JOIN v_leases l ON l.sample_id = s.sample_id AND l.epoch = s.epoch
    WHERE s.state = 'open'
),
silent AS (SELECT flying.*, CASE WHEN last_tokens_at > leased_at THEN last_tokens_at ELSE leased_at END AS since FROM flying)
SELECT r.name AS run, f.sample_id, CASE WHEN f.ended_at IS NULL THEN 'leased' ELSE 'waits for an engine' END AS state, f.epoch, f.moves,
       f.accepted_len AS accepted_tokens, round(CAST(f.since AS numeric), 1) AS since_unix_s,
       round(CAST(n.unix_s - f.since AS numeric), 1) AS silent_s, f.worker_id, w.kind, w.node, w.job_id,
       COALESCE(w.reason, '') AS worker_end_reason, f.reason AS lease_end_reason
FROM silent f
JOIN v_runs r ON r.run_id = f.run_id AND r.state = 'active'
CROSS JOIN v_now n
CROSS JOIN rules
LEFT JOIN v_workers w ON w.worker_id = f.worker_id
WHERE n.unix_s - f.since > rules.most_silent_s
ORDER BY f.since, f.sample_id;
