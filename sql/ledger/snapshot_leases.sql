-- The open leases of a run's groups that may still be delivered: open, complete, or ended by a step after final_step.
WITH wanted AS (
    SELECT group_id FROM samples WHERE run_id = :run_id AND state IN ('open', 'complete')
    UNION
    SELECT group_id FROM samples
    WHERE run_id = :run_id AND state IN ('consumed', 'filtered', 'masked', 'evaluated') AND ended_step > :final_step
)
SELECT l.sample_id, l.epoch, l.worker_id, l.version
FROM samples s
JOIN leases l ON l.sample_id = s.sample_id AND l.epoch = s.epoch
WHERE s.group_id IN (SELECT group_id FROM wanted) AND l.ended_at IS NULL;
