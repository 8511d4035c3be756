-- The samples of a run's groups that may still be delivered: open, complete, or ended by a step after final_step.
WITH wanted AS (
    SELECT group_id FROM samples WHERE run_id = :run_id AND state IN ('open', 'complete')
    UNION
    SELECT group_id FROM samples
    WHERE run_id = :run_id AND state IN ('consumed', 'filtered', 'masked', 'evaluated') AND ended_step > :final_step
)
SELECT s.*
FROM samples s
WHERE s.group_id IN (SELECT group_id FROM wanted)
ORDER BY s.sample_id;
