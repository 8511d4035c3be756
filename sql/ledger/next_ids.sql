-- The first unused ids.
SELECT
    (SELECT COALESCE(MAX(run_id), 0) + 1 FROM runs) AS next_run_id,
    (SELECT COALESCE(MAX(group_id), 0) + 1 FROM groups) AS next_group_id,
    (SELECT COALESCE(MAX(sample_id), 0) + 1 FROM samples) AS next_sample_id,
    (SELECT COALESCE(MAX(worker_id), 0) + 1 FROM workers) AS next_worker_id,
    (SELECT COALESCE(MAX(episode_id), 0) + 1 FROM episodes) AS next_episode_id,
    (SELECT COALESCE(MAX(call_id), 0) + 1 FROM tool_calls) AS next_tool_call_id,
    (SELECT COALESCE(MAX(delivery_id), 0) + 1 FROM deliveries) AS next_delivery_id;
