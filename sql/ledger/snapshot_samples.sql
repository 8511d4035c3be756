-- The samples of a run's groups that may still be delivered (open, complete, ended by a step after final_step, or poisoned in a step
-- that was not taken), each with its open lease's holder. No chunks: their lengths add up to accepted_len, which is written with them.
-- snapshot_groups reads the groups themselves, and repeats `wanted`.
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
SELECT s.group_id, s.epoch, l.worker_id, l.version, s.sample_id, s.sample_index, s.state,
       s.moves, s.accepted_len, s.finish, s.reward, s.ended_step, s.ended_attempt, s.reason, s.reward_version
FROM samples s
LEFT JOIN leases l ON l.sample_id = s.sample_id AND l.epoch = s.epoch AND l.ended_at IS NULL
WHERE s.group_id IN (SELECT group_id FROM wanted)
ORDER BY s.sample_id;
