-- What did each run cost: reserved and harvested GPU-hours, how much of them brought no token, and what came of it?
-- Reserved: the GPUs of the run's training jobs as Slurm showed them, from start to end; of a trainer that is no Slurm job, or was not seen,
-- those of its reserved engines while they were registered ("reserved_from" says which). Runs that name one job share its GPUs equally;
-- what a daemon recorded anew, after one that did not harvest, counts once. Harvested: the allocations of its engines' jobs, as far as they worked for it;
-- wasted: those that ended without a token (report wasted_starts). What is open counts up to the ledger's last commit. Steps are
-- training steps that survive; tokens are all that were accepted, regenerated ones those that were lost and generated again.
WITH brought AS (
    SELECT w.run_id, w.kind, w.intent_id, w.incarnation, w.joined_at,
           sum(CASE WHEN l.ended_at IS NULL THEN s.accepted_len ELSE l.end_len END - l.start_len) AS tokens,
           sum(l.regenerated) AS regenerated
    FROM v_workers w
    JOIN v_leases l ON l.worker_id = w.worker_id
    JOIN v_samples s ON s.sample_id = l.sample_id
    GROUP BY w.worker_id, w.run_id, w.kind, w.intent_id, w.incarnation, w.joined_at
),
tokens AS (
    SELECT run_id, sum(CASE WHEN kind = 'harvested' THEN tokens ELSE 0 END) AS harvested,
           sum(CASE WHEN kind = 'harvested' THEN 0 ELSE tokens END) AS reserved, sum(regenerated) AS regenerated
    FROM brought
    GROUP BY run_id
),
spent AS (
    SELECT h.run_id, h.gpus * (COALESCE(h.ended_at, n.unix_s, h.started_at) - h.started_at) AS gpu_s,
           CASE WHEN h.ended_at IS NOT NULL AND COALESCE(sum(b.tokens), 0) = 0 THEN 1 ELSE 0 END AS wasted
    FROM v_allocation_runs h
    CROSS JOIN v_now n
    LEFT JOIN brought b ON b.kind = 'harvested' AND b.intent_id = h.intent_id AND b.incarnation = h.restart_count AND b.run_id = h.run_id
         AND b.joined_at >= h.since_at AND (h.until_at IS NULL OR b.joined_at < h.until_at)
    GROUP BY h.intent_id, h.restart_count, h.run_id, h.gpus, h.started_at, h.ended_at, n.unix_s
),
harvested AS (SELECT run_id, count(*) AS allocations, sum(gpu_s) AS gpu_s, sum(wasted * gpu_s) AS wasted_gpu_s FROM spent GROUP BY run_id),
sharing AS (SELECT job_id, started_at, count(DISTINCT run_id) AS runs FROM v_training_jobs GROUP BY job_id, started_at),
held AS (
    SELECT id, run_id, job_id, gpus, started_at, ended_at,
           max(ended_at) OVER (PARTITION BY run_id, job_id ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS counted_until
    FROM v_training_jobs
),
trained AS (
    SELECT h.run_id, sum(h.gpus * (COALESCE(h.ended_at, n.unix_s, h.started_at)
                                   - CASE WHEN h.counted_until > h.started_at THEN h.counted_until ELSE h.started_at END) / s.runs) AS gpu_s
    FROM held h JOIN sharing s ON s.job_id = h.job_id AND s.started_at = h.started_at CROSS JOIN v_now n GROUP BY h.run_id
),
engines AS (
    SELECT w.run_id, sum(w.gpus * (COALESCE(w.left_at, n.unix_s, w.joined_at) - w.joined_at)) AS gpu_s
    FROM v_workers w CROSS JOIN v_now n WHERE w.kind = 'reserved' GROUP BY w.run_id
),
steps AS (SELECT run_id, count(*) AS steps FROM v_steps WHERE purpose = 'train' AND rewound_by IS NULL GROUP BY run_id)
SELECT r.run_id, r.name AS run, r.owner, r.state, COALESCE(s.steps, 0) AS steps,
       round(CAST(COALESCE(t.gpu_s, e.gpu_s, 0) / 3600 AS numeric), 4) AS reserved_gpu_hours,
       CASE WHEN t.gpu_s IS NOT NULL THEN 'training jobs' WHEN e.gpu_s IS NOT NULL THEN 'reserved engines' ELSE '' END AS reserved_from,
       COALESCE(h.allocations, 0) AS allocations, round(CAST(COALESCE(h.gpu_s, 0) / 3600 AS numeric), 4) AS harvested_gpu_hours,
       round(CAST(COALESCE(h.wasted_gpu_s, 0) / 3600 AS numeric), 4) AS wasted_gpu_hours,
       CAST(COALESCE(k.reserved, 0) AS bigint) AS reserved_tokens, CAST(COALESCE(k.harvested, 0) AS bigint) AS harvested_tokens,
       CAST(COALESCE(k.regenerated, 0) AS bigint) AS regenerated_tokens,
       round(CAST((COALESCE(t.gpu_s, e.gpu_s, 0) + COALESCE(h.gpu_s, 0)) / 3600 / NULLIF(s.steps, 0) AS numeric), 4) AS gpu_hours_per_step
FROM v_runs r
LEFT JOIN tokens k ON k.run_id = r.run_id
LEFT JOIN harvested h ON h.run_id = r.run_id
LEFT JOIN trained t ON t.run_id = r.run_id
LEFT JOIN engines e ON e.run_id = r.run_id
LEFT JOIN steps s ON s.run_id = r.run_id
ORDER BY r.run_id;
