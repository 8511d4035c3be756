-- Who generated the samples that snapshot_samples gives, lease by lease: (sample, worker, weight version, tokens). `wanted` is that of snapshot_samples.
WITH wanted AS (
    SELECT group_id FROM samples WHERE run_id = :run_id AND state IN ('open', 'complete')
    UNION
    SELECT group_id FROM samples
    WHERE run_id = :run_id AND state IN ('consumed', 'filtered', 'masked', 'evaluated') AND ended_step > :final_step
    UNION
    SELECT p.group_id FROM samples p
    JOIN groups q ON q.group_id = p.group_id
    LEFT JOIN steps t ON t.run_id = q.run_id AND t.purpose = q.purpose AND t.step = q.step AND t.rewound_by IS NULL
    WHERE p.run_id = :run_id AND p.state = 'poisoned' AND t.step IS NULL
)
SELECT l.sample_id, l.worker_id, l.version,
       CASE WHEN l.ended_at IS NULL THEN s.accepted_len ELSE l.end_len END - l.start_len AS tokens
FROM samples s
JOIN leases l ON l.sample_id = s.sample_id
WHERE s.group_id IN (SELECT group_id FROM wanted)
ORDER BY l.sample_id, l.epoch;
