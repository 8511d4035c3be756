-- How many GPU-hours did each user's runs harvest, how many tokens did they generate, and how many GPU-hours were wasted?
-- The user is the name under which the run's owner was enrolled, or the owner's public key. An allocation is wasted when no token
-- came of it (report wasted_starts); an open one counts up to the ledger's last commit and is not wasted yet.
-- One whose engine changed hands counts for each run as far as it worked for it.
WITH brought AS (
    SELECT w.intent_id, w.incarnation, w.run_id, w.joined_at,
           sum(CASE WHEN l.ended_at IS NULL THEN s.accepted_len ELSE l.end_len END - l.start_len) AS tokens
    FROM v_workers w
    JOIN v_leases l ON l.worker_id = w.worker_id
    JOIN v_samples s ON s.sample_id = l.sample_id
    WHERE w.kind = 'harvested'
    GROUP BY w.worker_id, w.intent_id, w.incarnation, w.run_id, w.joined_at
),
spent AS (
    SELECT h.run_id, h.gpus * (COALESCE(h.ended_at, n.unix_s, h.started_at) - h.started_at) AS gpu_s, h.ended_at,
           COALESCE(sum(b.tokens), 0) AS tokens
    FROM v_allocation_runs h
    CROSS JOIN v_now n
    LEFT JOIN brought b ON b.intent_id = h.intent_id AND b.incarnation = h.restart_count AND b.run_id = h.run_id
         AND b.joined_at >= h.since_at AND (h.until_at IS NULL OR b.joined_at < h.until_at)
    GROUP BY h.intent_id, h.restart_count, h.run_id, h.gpus, h.started_at, h.ended_at, n.unix_s
)
SELECT COALESCE(r.owner, '') AS owner, COALESCE(r.name, '') AS run, count(*) AS allocations,
       round(CAST(sum(p.gpu_s) / 3600 AS numeric), 4) AS gpu_hours,
       round(CAST(sum(CASE WHEN p.tokens = 0 AND p.ended_at IS NOT NULL THEN p.gpu_s ELSE 0 END) / 3600 AS numeric), 4)
           AS wasted_gpu_hours,
       CAST(sum(p.tokens) AS bigint) AS tokens, round(CAST(sum(p.tokens) / NULLIF(sum(p.gpu_s), 0) AS numeric), 1) AS tokens_per_gpu_s
FROM spent p
LEFT JOIN v_runs r ON r.run_id = p.run_id
GROUP BY r.owner, r.name
ORDER BY gpu_hours DESC, owner, run;
