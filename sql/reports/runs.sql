-- Which runs are there, how far are they, and which attempt of their trainer is the last?
SELECT run_id, name AS run, state, reason, attempt, resume_step, last_step, last_version,
       CAST(created_at AS bigint) AS created_unix_s, CAST(ended_at AS bigint) AS ended_unix_s
FROM v_runs
ORDER BY run_id;
