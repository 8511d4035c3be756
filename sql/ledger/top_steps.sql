-- A run's newest training steps that survive, with their metrics; the newest first.
SELECT step, attempt, version, metrics, committed_at
FROM v_steps
WHERE run_id = :run_id AND purpose = 'train' AND rewound_by IS NULL
ORDER BY step DESC
LIMIT :most;
