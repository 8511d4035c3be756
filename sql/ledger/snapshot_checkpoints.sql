-- Checkpoints from which a run may resume; the latest record of a step counts.
SELECT c.*
FROM checkpoints c
JOIN runs r ON r.run_id = c.run_id
WHERE c.rewound_by IS NULL
ORDER BY c.run_id, c.step, c.id;
