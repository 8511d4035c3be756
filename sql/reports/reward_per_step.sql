-- What was the mean reward of each surviving training step, over how many samples, and how many of them were used?
SELECT r.name AS run, t.step, t.attempt, t.version, count(s.sample_id) AS samples,
       CAST(COALESCE(sum(CASE WHEN s.state = 'consumed' THEN 1 ELSE 0 END), 0) AS bigint) AS consumed,
       round(CAST(avg(s.reward) AS numeric), 6) AS mean_reward, CAST(COALESCE(sum(s.accepted_len), 0) AS bigint) AS tokens,
       CAST(COALESCE(sum(CASE WHEN s.moves > 0 THEN 1 ELSE 0 END), 0) AS bigint) AS moved
FROM v_steps t
JOIN v_runs r ON r.run_id = t.run_id
LEFT JOIN v_samples s ON s.run_id = t.run_id AND s.ended_step = t.step AND s.ended_attempt = t.attempt
                   AND s.state IN ('consumed', 'filtered', 'masked')
WHERE t.purpose = 'train' AND t.rewound_by IS NULL
GROUP BY r.name, t.run_id, t.step, t.attempt, t.version
ORDER BY r.name, t.run_id, t.step;
