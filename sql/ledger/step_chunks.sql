-- The chunks of the samples generated for a step; all prompts when prompt_index is null.
SELECT c.sample_id, c.start_len, c.tokens, c.logprobs, c.raw_logprobs, c.routing
FROM groups g
JOIN samples s ON s.group_id = g.group_id
JOIN chunks c ON c.sample_id = s.sample_id
WHERE g.run_id = :run_id AND g.purpose = :purpose AND g.step = :step
  AND (CAST(:prompt_index AS bigint) IS NULL OR g.prompt_index = CAST(:prompt_index AS bigint));
