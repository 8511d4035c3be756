-- The groups of a run that may still be delivered: open, complete, ended by a step after final_step, or poisoned in a step that was
-- not taken. Columns: the version that it is wanted under, then records.GroupCreated's fields. snapshot_samples reads the samples of
-- the same groups, and repeats `wanted`.
-- substr(prompt, 1, 0) is an empty prompt of the column's own type. A group has it when its tokens were dropped or purged. It equals no
-- prompt that a trainer submits, so the group is generated again. (Only an attempt that starts before the oldest kept checkpoint asks.)
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
SELECT g.version, g.group_id, g.run_id, g.purpose, g.step, g.prompt_index, g.retry, g.created_version,
       CASE WHEN EXISTS (SELECT 1 FROM samples x WHERE x.group_id = g.group_id AND x.contents = 'dropped')
            THEN substr(g.prompt, 1, 0) ELSE g.prompt END AS prompt,
       g.n, g.first_sample_id, g.sampling, g.meta, g.created_at
FROM groups g
WHERE g.group_id IN (SELECT group_id FROM wanted)
ORDER BY g.group_id;
