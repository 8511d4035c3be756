-- A run's newest training steps that survive, with their metrics, of each at most 64 Ki characters; the newest first.
SELECT step, attempt, version, CASE WHEN length(metrics) <= 65536 THEN substr(metrics, 1, 65536) ELSE '{}' END AS metrics, committed_at
FROM v_steps
WHERE run_id = :run_id AND purpose = 'train' AND rewound_by IS NULL
ORDER BY step DESC
LIMIT :most;
