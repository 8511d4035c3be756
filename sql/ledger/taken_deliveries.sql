-- Deliveries to a run that steps after a given one took, which a resume takes back. The newest come with rows, up to a sum of their bytes.
SELECT d.delivery_id, d.run_id, p.name AS source, d.group_delivery_id AS "group", d.step, d.prompt_index, d.episode_index,
       e.name AS episode, d.reward, d.version,
       CASE WHEN sum(length(d.episode_rows)) OVER (ORDER BY d.group_delivery_id DESC, d.delivery_id DESC) <= :most_bytes
            THEN d.episode_rows ELSE substr(d.episode_rows, 1, 0) END AS rows,
       d.state, d.ended_step
FROM deliveries d
JOIN runs p ON p.run_id = d.source_run_id
JOIN episodes e ON e.episode_id = d.episode_id
WHERE d.run_id = :run_id AND length(d.episode_rows) > 0
  AND d.state IN ('consumed', 'filtered', 'masked') AND d.ended_step > :after_step
ORDER BY d.delivery_id;
