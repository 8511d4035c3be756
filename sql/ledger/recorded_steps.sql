-- A run's optimizer steps after a given one, with the trainer's own metrics.
SELECT step, metrics, committed_at
FROM steps
WHERE run_id = :run_id AND purpose = 'train' AND rewound_by IS NULL AND step > :after_step
ORDER BY step;
