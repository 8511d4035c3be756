-- Waits of other users' jobs that have not ended.
SELECT job_id, user_name, partition, gpus, submitted_at, eligible_at, seen_at, harvested_gpus, cluster FROM other_users_waits WHERE ended_at IS NULL ORDER BY id;
