-- Do engines, job states and allocations contradict each other: was a GPU in use that no allocation has? (No row: no.)
-- A poll of the whole cluster is a row of cluster_polls: what happened between two polls is known to within one polling interval. An
-- engine that was asked to leave may say so up to a minute after its job began to end (Slurm's KillWait). Jobs that end are settled when
-- they are seen to have ended, so a row may also be of a moment that is not over yet: ask again after the next poll.
WITH held AS ( -- job ids count within a cluster
    SELECT h.*, COALESCE(j.cluster, '') AS cluster FROM v_gpu_allocations h LEFT JOIN v_jobs j ON j.intent_id = h.intent_id
),
polled AS (
    SELECT h.intent_id, h.restart_count, h.started_at, h.ended_at,
           COALESCE((SELECT min(c.at) FROM v_cluster_polls c WHERE c.cluster = h.cluster AND c.at >= h.started_at)
                    - (SELECT max(c.at) FROM v_cluster_polls c WHERE c.cluster = h.cluster AND c.at < h.started_at), 60.0) AS start_poll_s,
           COALESCE((SELECT min(c.at) FROM v_cluster_polls c WHERE c.cluster = h.cluster AND c.at >= h.ended_at)
                    - (SELECT max(c.at) FROM v_cluster_polls c WHERE c.cluster = h.cluster AND c.at < h.ended_at), 60.0) AS end_poll_s
    FROM held h
),
in_order AS (
    SELECT h.intent_id, h.job_id, h.restart_count, h.started_at, h.ended_at,
           lag(h.restart_count) OVER (PARTITION BY h.cluster, h.job_id ORDER BY h.started_at, h.restart_count) AS before_count,
           lag(h.started_at) OVER (PARTITION BY h.cluster, h.job_id ORDER BY h.started_at, h.restart_count) AS before_start,
           lag(h.ended_at) OVER (PARTITION BY h.cluster, h.job_id ORDER BY h.started_at, h.restart_count) AS before_end
    FROM held h
    WHERE h.job_id > 0
)
SELECT 'an engine without an allocation' AS problem, w.run_id, w.intent_id,
       'worker ' || CAST(w.worker_id AS text) || ', job ' || CAST(w.job_id AS text) || ', restart ' || CAST(w.incarnation AS text)
       || ', on ' || w.node AS detail
FROM v_workers w
LEFT JOIN v_jobs j ON j.intent_id = w.intent_id
WHERE w.kind = 'harvested'
  AND w.intent_id NOT LIKE 'guest-%' -- it lives in the job of an inference service, which is none of ours
  AND NOT EXISTS (SELECT 1 FROM v_gpu_allocations h WHERE h.intent_id = w.intent_id AND h.restart_count = w.incarnation)
  AND (j.intent_id IS NULL OR j.ended_at IS NOT NULL OR j.restart_count > w.incarnation
       OR (j.restart_count = w.incarnation AND j.last_state = 'RUNNING' AND j.flags NOT LIKE '%COMPLETING%'))
UNION ALL
SELECT 'seen to run without an allocation', COALESCE(j.run_id, 0), s.intent_id,
       'job ' || CAST(s.job_id AS text) || ', restart ' || CAST(s.restart_count AS text) || ', on ' || max(s.node)
FROM v_job_states s
LEFT JOIN v_jobs j ON j.intent_id = s.intent_id
WHERE COALESCE(j.kind, 'engine') = 'engine' AND s.state IN ('RUNNING', 'SUSPENDED') AND s.flags NOT LIKE '%COMPLETING%'
  AND NOT EXISTS (SELECT 1 FROM v_gpu_allocations h WHERE h.intent_id = s.intent_id AND h.restart_count = s.restart_count)
GROUP BY j.run_id, s.intent_id, s.job_id, s.restart_count
UNION ALL
SELECT 'fewer allocations that ended than restarts', j.run_id, j.intent_id,
       'job ' || CAST(j.job_id AS text) || ' was put back ' || CAST(j.restart_count AS text) || ' times, '
       || CAST((SELECT count(*) FROM v_gpu_allocations h WHERE h.intent_id = j.intent_id AND h.restart_count < j.restart_count
                AND h.ended_at IS NOT NULL) AS text) || ' allocations say so'
FROM v_jobs j
WHERE j.kind = 'engine' AND j.restart_count > 0 AND (j.ended_at IS NOT NULL OR j.flags NOT LIKE '%COMPLETING%')
  AND j.restart_count > (SELECT count(*) FROM v_gpu_allocations h WHERE h.intent_id = j.intent_id AND h.restart_count < j.restart_count
                         AND h.ended_at IS NOT NULL)
UNION ALL
SELECT 'an allocation is open although its job ended', j.run_id, j.intent_id,
       'job ' || CAST(h.job_id AS text) || ', restart ' || CAST(h.restart_count AS text) || ', on ' || h.node
FROM v_jobs j
JOIN v_gpu_allocations h ON h.intent_id = j.intent_id AND h.ended_at IS NULL
WHERE j.ended_at IS NOT NULL
UNION ALL
SELECT 'an allocation ends before it begins', COALESCE(j.run_id, 0), h.intent_id,
       'job ' || CAST(h.job_id AS text) || ', restart ' || CAST(h.restart_count AS text)
FROM v_gpu_allocations h
LEFT JOIN v_jobs j ON j.intent_id = h.intent_id
WHERE h.ended_at < h.started_at
UNION ALL
SELECT 'two allocations of one job overlap', COALESCE(j.run_id, 0), o.intent_id,
       'job ' || CAST(o.job_id AS text) || ', restarts ' || CAST(o.before_count AS text) || ' and ' || CAST(o.restart_count AS text)
FROM in_order o
LEFT JOIN v_jobs j ON j.intent_id = o.intent_id
WHERE o.before_start IS NOT NULL AND (o.before_end IS NULL OR o.started_at < o.before_end - 1.0)
UNION ALL
SELECT 'an engine outside its allocation', w.run_id, w.intent_id,
       'worker ' || CAST(w.worker_id AS text) || ', job ' || CAST(w.job_id AS text) || ', restart ' || CAST(w.incarnation AS text)
       || CASE WHEN w.joined_at < l.started_at - l.start_poll_s
               THEN ', registered ' || CAST(round(CAST(l.started_at - w.joined_at AS numeric), 1) AS text) || ' s before it began'
               ELSE ', said goodbye ' || CAST(round(CAST(w.left_at - l.ended_at AS numeric), 1) AS text) || ' s after it ended' END
FROM v_workers w
JOIN polled l ON l.intent_id = w.intent_id AND l.restart_count = w.incarnation
WHERE w.joined_at < l.started_at - l.start_poll_s
   OR (w.notice AND w.left_at > l.ended_at + l.end_poll_s + 60.0)
   OR w.joined_at > l.ended_at + l.end_poll_s + 60.0
ORDER BY 1, 2, 3, 4;
