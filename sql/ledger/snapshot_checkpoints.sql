-- Checkpoints from which a run that has not ended may resume; the latest record of a step counts.
SELECT c.*
FROM checkpoints c
JOIN runs r ON r.run_id = c.run_id
WHERE r.state = 'active' AND c.rewound_by IS NULL
ORDER BY c.run_id, c.step, c.id;
