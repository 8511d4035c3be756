-- The samples generated for a step, with their prompts; all prompts when prompt_index is null.
SELECT s.*, g.step, g.prompt_index, g.retry, g.prompt, g.meta
FROM groups g
JOIN samples s ON s.group_id = g.group_id
WHERE g.run_id = :run_id AND g.purpose = :purpose AND g.step = :step
  AND (CAST(:prompt_index AS bigint) IS NULL OR g.prompt_index = CAST(:prompt_index AS bigint))
ORDER BY g.prompt_index, g.retry, s.sample_index;
