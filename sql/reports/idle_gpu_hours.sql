-- How many GPU-hours were idle and not harvested, by day (UTC) and reason?
-- Between two observations of the cluster the idle GPUs of the first count, on the day it was made, under what the harvest policy
-- decided on it; the newest counts up to the ledger's last commit. The words of the policy are those of scavenger/harvest/policy.py.
WITH seen AS (
    SELECT at, day, idle, COALESCE(lead(at) OVER (ORDER BY at, id), (SELECT unix_s FROM v_now)) AS until FROM v_cluster_samples
),
spells AS (
    SELECT s.day, s.idle, s.until - s.at AS lasted_s,
           (SELECT d.id FROM v_decisions d WHERE d.at < s.until AND d.policy = 'harvest' ORDER BY d.at DESC, d.id DESC LIMIT 1) AS decision
    FROM seen s
    WHERE s.until > s.at AND s.idle > 0
),
explained AS (
    SELECT p.day, p.idle * p.lasted_s AS gpu_s, COALESCE(d.reason, '') AS words,
           CASE WHEN p.lasted_s > 300 THEN 'not observed for over 300 s, the daemon or Slurm was away (idle as last seen)'
                WHEN d.id IS NULL THEN 'nothing was decided yet'
                WHEN d.action = 'submit' THEN 'jobs for them were being submitted'
                WHEN d.action <> 'none' THEN 'engines were being given back'
                WHEN d.reason LIKE 'the last observation is %' THEN 'the observation was too old to decide on'
                WHEN d.reason LIKE '%no run is open' THEN 'no run is open'
                WHEN d.reason LIKE '0 engines wanted, %' THEN 'no run wants engines'
                WHEN d.reason LIKE '%partition % is down' OR d.reason LIKE '%partition % is not there' THEN 'the partition is down'
                WHEN d.reason LIKE '%backs off: %' THEN 'backing off after failures'
                WHEN d.reason LIKE '%max_engines = %' THEN 'limit max_engines'
                WHEN d.reason LIKE '%max_pending = %' THEN 'limit max_pending'
                WHEN d.reason LIKE '%no room for more: %others'' pending jobs%' THEN 'others'' pending jobs may take them'
                WHEN d.reason LIKE '%no room for more: % for our own%' THEN 'our own pending jobs are to take them'
                WHEN d.reason LIKE '%no room for more: %headroom %' THEN 'limit headroom_gpus'
                WHEN d.reason LIKE '%no room for more: %quarantined: %' THEN 'their nodes are quarantined'
                WHEN d.reason LIKE '%no room for more: %' THEN 'no node has room for a whole engine'
                WHEN d.reason LIKE '%, 0 wait%' THEN 'every wanted engine runs'
                ELSE 'our own pending jobs are to take them' END AS reason
    FROM spells p
    LEFT JOIN v_decisions d ON d.id = p.decision
)
SELECT d.day_utc, e.reason, count(*) AS observations, round(CAST(sum(e.gpu_s) / 3600 AS numeric), 4) AS idle_gpu_hours,
       max(e.words) AS for_example
FROM explained e
JOIN v_days d ON d.day = e.day
GROUP BY d.day_utc, e.reason
ORDER BY d.day_utc, idle_gpu_hours DESC, e.reason;
