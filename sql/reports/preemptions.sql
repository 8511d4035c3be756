-- Which harvested jobs lost their GPUs, with notice or none, and what became of the tokens in flight?
-- One row for each allocation that neither we nor the job itself ended; "salvaged" tokens went on elsewhere, "regenerated" ones were lost.
-- An engine that was given up for lost and came back, or went on for another run, is two workers of one allocation: the row has the last one's word.
SELECT CAST(h.ended_at AS bigint) AS ended_unix_s, h.job_id, h.restart_count, h.node, h.gpus, h.reason,
       CASE WHEN w.worker_id IS NULL THEN 'no engine yet' WHEN w.notice IS NULL THEN 'unknown' WHEN w.notice THEN 'notice'
            ELSE 'none' END AS notice,
       COALESCE(w.samples, 0) AS samples_in_flight, COALESCE(w.salvaged, 0) AS tokens_salvaged,
       COALESCE(w.regenerated, 0) AS tokens_regenerated, round(CAST(h.ended_at - h.started_at AS numeric), 1) AS allocated_s
FROM v_gpu_allocations h
LEFT JOIN v_workers w ON w.worker_id = (
    SELECT max(worker_id) FROM v_workers x WHERE x.intent_id = h.intent_id AND x.incarnation = h.restart_count)
WHERE h.ended_at IS NOT NULL AND h.reason NOT IN ('cancelled', 'completed', 'requeued')
ORDER BY h.ended_at, h.job_id, w.worker_id;
