-- The groups of a run's groups that may still be delivered: open, complete, or ended by a step after final_step.
WITH wanted AS (
    SELECT group_id FROM samples WHERE run_id = :run_id AND state IN ('open', 'complete')
    UNION
    SELECT group_id FROM samples
    WHERE run_id = :run_id AND state IN ('consumed', 'filtered', 'masked', 'evaluated') AND ended_step > :final_step
)
SELECT g.*
FROM groups g
WHERE g.group_id IN (SELECT group_id FROM wanted)
ORDER BY g.group_id;
