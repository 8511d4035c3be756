-- Training jobs that are not known to have ended.
SELECT run_id, job_id, user_name, account, nodes, gpus, started_at FROM training_jobs WHERE ended_at IS NULL ORDER BY id;
