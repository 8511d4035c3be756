-- How many tokens a second did engines generate, by run, engine, node and weight version?
-- An engine is busy while it holds a lease of that version, however many it holds; "engine_tokens_per_s" is over that time,
-- "sample_tokens_per_s" over the sum of all its leases. An open lease counts up to the ledger's last commit.
WITH spans AS (
    SELECT l.worker_id, l.version, l.granted_at AS began,
           CASE WHEN COALESCE(l.ended_at, n.unix_s) > l.granted_at THEN COALESCE(l.ended_at, n.unix_s) ELSE l.granted_at END AS ended,
           CASE WHEN l.ended_at IS NULL THEN s.accepted_len ELSE l.end_len END - l.start_len AS tokens
    FROM v_leases l
    JOIN v_samples s ON s.sample_id = l.sample_id
    CROSS JOIN v_now n
),
reached AS (
    SELECT spans.*, max(ended) OVER (
               PARTITION BY worker_id, version ORDER BY began, ended ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
           ) AS busy_until
    FROM spans
),
-- What each lease adds to its engine's busy time: all of it, or what reaches beyond the leases that began before.
added AS (
    SELECT worker_id, version, tokens, ended - began AS lease_s,
           CASE WHEN busy_until IS NULL OR busy_until <= began THEN ended - began
                WHEN busy_until < ended THEN ended - busy_until ELSE 0 END AS busy_s
    FROM reached
)
SELECT r.name AS run, w.engine, w.kind, w.node, a.version, count(DISTINCT a.worker_id) AS engines, count(*) AS leases,
       CAST(sum(a.tokens) AS bigint) AS tokens, round(CAST(sum(a.busy_s) AS numeric), 1) AS busy_s,
       round(CAST(sum(a.tokens) / NULLIF(sum(a.busy_s), 0) AS numeric), 1) AS engine_tokens_per_s,
       round(CAST(sum(a.tokens) / NULLIF(sum(a.lease_s), 0) AS numeric), 1) AS sample_tokens_per_s
FROM added a
JOIN v_workers w ON w.worker_id = a.worker_id
JOIN v_runs r ON r.run_id = w.run_id
GROUP BY r.name, w.engine, w.kind, w.node, a.version
ORDER BY r.name, a.version, w.engine, w.kind, w.node;
