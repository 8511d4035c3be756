-- What each run's surviving checkpoints say of those that are kept.
SELECT run_id, step, kept
FROM checkpoints
WHERE rewound_by IS NULL
ORDER BY run_id, step, id;
