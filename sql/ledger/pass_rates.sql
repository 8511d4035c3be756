-- How often the prompts of a run's training steps up to `until_step` were answered with a reward of `solved_at` or more, by group. A masked
-- sample has a reward only where it was ended by the length limit; PostgreSQL keeps the NaN of the others, and takes it for the greatest.
SELECT g.step, g.prompt_index, SUM(CASE WHEN s.reward >= :solved_at THEN 1 ELSE 0 END) AS passed, COUNT(*) AS scored
FROM groups g
JOIN samples s ON s.group_id = g.group_id
WHERE g.run_id = :run_id AND g.purpose = 'train' AND g.step <= :until_step AND s.state IN ('consumed', 'filtered', 'masked')
  AND s.reward <= 1.7e308
GROUP BY g.step, g.prompt_index
ORDER BY g.step DESC, g.prompt_index
LIMIT :most;
