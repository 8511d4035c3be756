-- Which other users' jobs waited while harvested jobs had GPUs there, for how long, and how many GPUs were ours meanwhile? (The newest; "bounds": how many, of which Unix seconds.)
-- One row for each wait that a poll saw while we held GPUs on nodes of the job's partitions; a job array is one row. "waited_s" counts
-- from when the job could have started (submitted, its begin time, or no longer held) to Slurm's start time, to when it was seen to be
-- gone or held, or up to the ledger's last commit. Not every such wait is due to us: the job may wait for more GPUs than we held, or for
-- its turn. A job that Slurm's preemption is about to start waits too: for a poll's seconds.
WITH bounds AS (SELECT 1000 AS most, 0.0 AS since, 9999999999.0 AS until),
newest AS (
  SELECT * FROM v_other_users_waits WHERE harvested_gpus > 0 AND seen_at >= (SELECT since FROM bounds) AND seen_at < (SELECT until FROM bounds)
  ORDER BY id DESC LIMIT (SELECT most FROM bounds)
)
SELECT w.job_id, w.user_name, w.partition, w.gpus, CAST(w.submitted_at AS bigint) AS submitted_unix_s,
       CAST(w.started_at AS bigint) AS started_unix_s, CASE WHEN w.ended_at IS NULL THEN 'waits' ELSE w.outcome END AS outcome,
       round(CAST(CASE WHEN COALESCE(w.started_at, w.ended_at, n.unix_s) > w.eligible_at
                       THEN COALESCE(w.started_at, w.ended_at, n.unix_s) - w.eligible_at ELSE 0 END AS numeric), 1) AS waited_s,
       w.harvested_gpus AS most_harvested_gpus_meanwhile, round(CAST(w.harvested_gpu_s / 3600 AS numeric), 4) AS harvested_gpu_hours_meanwhile
FROM newest w
CROSS JOIN v_now n
ORDER BY w.id;
