-- For how long did others' jobs wait for GPUs while harvested jobs held some, by day (UTC)?
-- Between two observations of the cluster the numbers of the first count, on the day it was made, for 300 s at most, as in
-- idle_gpu_hours; the time after that is "not observed". A job that Slurm's preemption is about to start waits too, so a director looks for hours, not for zero.
WITH seen AS (
    SELECT day, at, harvested, pending_others, COALESCE(lead(at) OVER (ORDER BY at, id), (SELECT unix_s FROM v_now)) AS until
    FROM v_cluster_samples
),
spells AS (
    SELECT day, harvested, pending_others, CASE WHEN until - at > 300 THEN 300 ELSE until - at END AS lasted_s,
           CASE WHEN until - at > 300 THEN until - at - 300 ELSE 0 END AS unseen_s,
           CASE WHEN harvested > 0 AND pending_others > 0 THEN 1 ELSE 0 END AS both
    FROM seen
    WHERE until > at
)
SELECT d.day_utc, round(CAST(sum(s.lasted_s) / 3600 AS numeric), 4) AS observed_hours,
       round(CAST(sum(s.unseen_s) / 3600 AS numeric), 4) AS not_observed_hours,
       round(CAST(sum(CASE WHEN s.pending_others > 0 THEN s.lasted_s ELSE 0 END) / 3600 AS numeric), 4) AS others_waiting_hours,
       round(CAST(sum(s.both * s.lasted_s) / 3600 AS numeric), 4) AS others_waiting_while_harvesting_hours,
       round(CAST(sum(s.both * s.harvested * s.lasted_s) / 3600 AS numeric), 4) AS harvested_gpu_hours_meanwhile,
       max(s.pending_others) AS most_jobs_waiting
FROM spells s
JOIN v_days d ON d.day = s.day
GROUP BY d.day_utc
ORDER BY d.day_utc;
