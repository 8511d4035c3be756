-- The samples generated for a step, and whether a step or evaluation of that number survives.
SELECT s.sample_id, s.group_id, g.step, s.state, s.ended_step,
       CASE WHEN EXISTS (
           SELECT 1 FROM steps t WHERE t.run_id = g.run_id AND t.purpose = g.purpose AND t.step = g.step AND t.rewound_by IS NULL
       ) THEN 1 ELSE 0 END AS taken,
       s.contents, s.accepted_len
FROM groups g
JOIN samples s ON s.group_id = g.group_id
WHERE g.run_id = :run_id AND g.purpose IN ('train', 'eval') AND g.step = :step
ORDER BY s.sample_id;
