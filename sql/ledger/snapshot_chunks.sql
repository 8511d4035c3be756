-- The chunks of a run's groups that may still be delivered: open, complete, ended by a step after
-- final_step, or poisoned in a step that was not taken.
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
SELECT c.sample_id, c.start_len, c.tokens, c.logprobs, c.raw_logprobs
FROM samples s
JOIN chunks c ON c.sample_id = s.sample_id
WHERE s.group_id IN (SELECT group_id FROM wanted);
