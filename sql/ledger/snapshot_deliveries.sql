-- Deliveries that are due to a run.
SELECT d.delivery_id, d.run_id, p.name AS source, d.group_delivery_id AS "group", d.step, d.prompt_index, d.episode_index,
       e.name AS episode, d.reward, d.version, d.episode_rows AS rows, d.state, d.ended_step
FROM deliveries d
JOIN runs p ON p.run_id = d.source_run_id
JOIN episodes e ON e.episode_id = d.episode_id
WHERE d.run_id = :run_id AND length(d.episode_rows) > 0 AND d.state = 'due'
ORDER BY d.delivery_id;
