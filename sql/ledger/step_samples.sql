-- The samples generated for a step, with their prompts; all groups when group_id is null.
SELECT s.*, g.step, g.prompt_index, g.take, g.prompt, g.meta
FROM groups g
JOIN samples s ON s.group_id = g.group_id
WHERE g.run_id = :run_id AND g.purpose = :purpose AND g.step = :step
  AND (CAST(:group_id AS bigint) IS NULL OR g.group_id = CAST(:group_id AS bigint))
ORDER BY g.prompt_index, g.take, s.sample_index;
