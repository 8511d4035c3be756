-- How often each prompt's group was given up, by the newest of them: the next group of that prompt is its next retry.
SELECT g.run_id, g.purpose, g.step, g.prompt_index, MAX(g.retry) AS retry
FROM groups g
WHERE g.purpose <> 'turn' AND g.group_id IN (SELECT group_id FROM samples WHERE state IN ('superseded', 'poisoned', 'surplus'))
GROUP BY g.run_id, g.purpose, g.step, g.prompt_index
ORDER BY g.run_id, g.purpose, g.step, g.prompt_index;
