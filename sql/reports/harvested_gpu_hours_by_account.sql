-- How many GPU-hours did each user's runs harvest, by user and Slurm account, how many tokens did they generate, and how many GPU-hours were wasted?
-- The user is the name under which the run's owner was enrolled, or the owner's public key. The account is that of the run's training
-- job that had begun when the allocation did (its first one, where none had). "none": Slurm has no account for that job, for one because
-- it keeps no accounts. "unknown": no training job of the run was seen in the queue. Waste and open allocations are as in harvested_gpu_hours_by_user.
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
           COALESCE(sum(b.tokens), 0) AS tokens,
           COALESCE((SELECT t.account FROM v_training_jobs t WHERE t.run_id = h.run_id AND t.started_at <= h.started_at
                     ORDER BY t.started_at DESC, t.id DESC LIMIT 1),
                    (SELECT t.account FROM v_training_jobs t WHERE t.run_id = h.run_id ORDER BY t.started_at, t.id LIMIT 1),
                    'unknown') AS account
    FROM v_allocation_runs h
    CROSS JOIN v_now n
    LEFT JOIN brought b ON b.intent_id = h.intent_id AND b.incarnation = h.restart_count AND b.run_id = h.run_id
         AND b.joined_at >= h.since_at AND (h.until_at IS NULL OR b.joined_at < h.until_at)
    GROUP BY h.intent_id, h.restart_count, h.run_id, h.gpus, h.started_at, h.ended_at, n.unix_s
)
SELECT COALESCE(r.owner, '') AS owner, CASE WHEN p.account = '' THEN 'none' ELSE p.account END AS account,
       count(DISTINCT p.run_id) AS runs, count(*) AS allocations,
       round(CAST(sum(p.gpu_s) / 3600 AS numeric), 4) AS gpu_hours,
       round(CAST(sum(CASE WHEN p.tokens = 0 AND p.ended_at IS NOT NULL THEN p.gpu_s ELSE 0 END) / 3600 AS numeric), 4)
           AS wasted_gpu_hours,
       CAST(sum(p.tokens) AS bigint) AS tokens, round(CAST(sum(p.tokens) / NULLIF(sum(p.gpu_s), 0) AS numeric), 1) AS tokens_per_gpu_s
FROM spent p
LEFT JOIN v_runs r ON r.run_id = p.run_id
GROUP BY r.owner, p.account
ORDER BY gpu_hours DESC, owner, account;
