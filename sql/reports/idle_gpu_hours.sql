-- How many GPU-hours were idle and not harvested, by day (UTC), cluster and reason?
-- Between two polls of the cluster the idle GPUs of the first count, on the day it was made, under what the harvest policy
-- decided on that cluster; the newest counts up to the ledger's last commit. A poll counts for 300 s at most, as in other_users_waiting; the
-- time after that is "not observed", with the GPUs idle as last seen. `code` is of scavenger/harvest/decide/actions.py:Code.
WITH polls AS (
    SELECT at, day, cluster, gpus_idle, COALESCE(lead(at) OVER (PARTITION BY cluster ORDER BY at, id), (SELECT unix_s FROM v_now)) AS next_at FROM v_cluster_polls
),
seen AS (
    SELECT at, day, cluster, gpus_idle, next_at, CASE WHEN next_at - at > 300 THEN at + 300 ELSE next_at END AS until FROM polls
),
spells AS (
    SELECT s.day, s.cluster, s.gpus_idle, s.until - s.at AS lasted_s,
           (SELECT d.id FROM v_decisions d WHERE d.at < s.until AND d.policy = 'harvest' AND d.cluster = s.cluster ORDER BY d.at DESC, d.id DESC LIMIT 1) AS decision
    FROM seen s
    WHERE s.until > s.at AND s.gpus_idle > 0
),
explained AS (
    SELECT p.day, p.cluster, p.gpus_idle * p.lasted_s AS gpu_s, COALESCE(d.reason, '') AS words,
           CASE WHEN d.id IS NULL THEN 'nothing was decided yet'
                WHEN d.action = 'submit' THEN 'jobs for them were being submitted'
                WHEN d.action <> 'none' THEN 'engines were being drained'
                ELSE CASE d.code
                     WHEN 'stale_view' THEN 'the poll was too old to decide on'
                     WHEN 'no_run' THEN 'no run is open'
                     WHEN 'no_demand' THEN 'no run wants engines'
                     WHEN 'not_encrypted' THEN 'runs without weights.encrypt: no engines beyond the link'
                     WHEN 'served' THEN 'every wanted engine runs'
                     WHEN 'partition_down' THEN 'the partition is down'
                     WHEN 'backoff' THEN 'backing off after failures'
                     WHEN 'max_engines' THEN 'limit max_engines'
                     WHEN 'max_gpus' THEN 'limit max_gpus'
                     WHEN 'max_per_user' THEN 'limit max_gpus_per_user'
                     WHEN 'max_per_owner' THEN 'limit owners.max_gpus'
                     WHEN 'account_limit' THEN 'a limit of our QOS or account in Slurm'
                     WHEN 'preemptions' THEN 'limit max_preemptions_per_hour'
                     WHEN 'stopped' THEN 'harvesting is stopped (stop file or drain)'
                     WHEN 'hidden' THEN 'other users'' jobs are hidden, and some could not preempt ours'
                     WHEN 'reserved' THEN 'a reservation begins soon on their nodes'
                     WHEN 'planned' THEN 'Slurm keeps their nodes for larger jobs that it expects soon'
                     WHEN 'per_node' THEN 'limit max_gpus_per_node'
                     WHEN 'per_partition' THEN 'limit max_gpus_by_partition or max_gpus_by_type'
                     WHEN 'per_owner_nodes' THEN 'owners.gpu_types_of or partitions_of: not nodes of the owners that want engines'
                     WHEN 'blackout' THEN 'a dated blackout ([[harvest.blackout]])'
                     WHEN 'max_pending' THEN 'limit max_pending'
                     WHEN 'other_users_pending' THEN 'other users'' pending jobs may take them'
                     WHEN 'own_pending' THEN 'our own pending jobs are to take them'
                     WHEN 'headroom' THEN 'limit headroom_gpus'
                     WHEN 'quarantine' THEN 'their nodes are quarantined'
                     WHEN 'settling' THEN 'not idle for long enough to outlast a start, or not worth one'
                     WHEN 'no_capacity' THEN 'no node has free capacity for a whole engine'
                     WHEN '' THEN 'the decision has no code (see example_reason)'
                     ELSE d.code END END AS reason
    FROM spells p
    LEFT JOIN v_decisions d ON d.id = p.decision
    UNION ALL
    SELECT day, cluster, gpus_idle * (next_at - until), '', 'not observed: for over 300 s the daemon or Slurm was away (idle as last seen)'
    FROM seen
    WHERE next_at > until AND gpus_idle > 0
)
SELECT d.day_utc, e.reason, count(*) AS polls, round(CAST(sum(e.gpu_s) / 3600 AS numeric), 4) AS idle_gpu_hours,
       max(e.words) AS example_reason, e.cluster
FROM explained e
JOIN v_days d ON d.day = e.day
GROUP BY d.day_utc, e.cluster, e.reason
ORDER BY d.day_utc, e.cluster, idle_gpu_hours DESC, e.reason;
