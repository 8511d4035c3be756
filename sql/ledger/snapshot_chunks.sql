-- The chunks of a run's groups that may still be delivered: open, complete, or ended by a step after final_step.
WITH wanted AS (
    SELECT group_id FROM samples WHERE run_id = :run_id AND state IN ('open', 'complete')
    UNION
    SELECT group_id FROM samples
    WHERE run_id = :run_id AND state IN ('consumed', 'filtered', 'masked', 'evaluated') AND ended_step > :final_step
)
SELECT c.sample_id, c.start_len, c.tokens, c.logprobs, c.raw_logprobs
FROM samples s
JOIN chunks c ON c.sample_id = s.sample_id
WHERE s.group_id IN (SELECT group_id FROM wanted);
