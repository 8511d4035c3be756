-- Runs: the open ones first, then those that ended, each the newest first.
SELECT run_id, name, state, reason, attempt, last_step, last_version, tokenizer, created_at, ended_at
FROM v_runs
ORDER BY CASE WHEN state = 'active' THEN 0 ELSE 1 END, run_id DESC
LIMIT :most;
