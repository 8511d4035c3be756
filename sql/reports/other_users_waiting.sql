-- For how long did other users' jobs wait for GPUs while harvested jobs had some, by day (UTC)?
-- Between two polls of the cluster the numbers of the first count, on the day it was made, for 300 s at most, as in
-- idle_gpu_hours; the time after that is "not observed". A job
-- that Slurm's preemption is about to start waits too, so hours count here, not seconds.
WITH seen AS (
    SELECT day, at, gpus_harvested, jobs_pending_other_users, COALESCE(lead(at) OVER (PARTITION BY cluster ORDER BY at, id), (SELECT unix_s FROM v_now)) AS until
    FROM v_cluster_polls
),
spells AS (
    SELECT day, gpus_harvested, jobs_pending_other_users, CASE WHEN until - at > 300 THEN 300.0 ELSE until - at END AS lasted_s,
           CASE WHEN until - at > 300 THEN until - at - 300 ELSE 0.0 END AS unseen_s,
           CASE WHEN gpus_harvested > 0 AND jobs_pending_other_users > 0 THEN 1 ELSE 0 END AS both
    FROM seen
    WHERE until > at
)
SELECT d.day_utc, round(CAST(sum(s.lasted_s) / 3600 AS numeric), 4) AS observed_hours,
       round(CAST(sum(s.unseen_s) / 3600 AS numeric), 4) AS not_observed_hours,
       round(CAST(sum(CASE WHEN s.jobs_pending_other_users > 0 THEN s.lasted_s ELSE 0.0 END) / 3600 AS numeric), 4) AS other_users_waiting_hours,
       round(CAST(sum(s.both * s.lasted_s) / 3600 AS numeric), 4) AS other_users_waiting_while_harvesting_hours,
       round(CAST(sum(s.both * s.gpus_harvested * s.lasted_s) / 3600 AS numeric), 4) AS harvested_gpu_hours_meanwhile,
       max(s.jobs_pending_other_users) AS most_jobs_waiting
FROM spells s
JOIN v_days d ON d.day = s.day
GROUP BY d.day_utc
ORDER BY d.day_utc;
