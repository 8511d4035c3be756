-- The completions of those steps and of the one under way - how long they are, who ended them, and when they were asked for.
SELECT g.step, g.group_id, g.prompt_index, g.created_at, g.sampling, COALESCE(g.purged_prompt_tokens, length(g.prompt) / 4) AS prompt_tokens,
       s.sample_id, s.sample_index, s.accepted_len AS length, s.finish, s.state, s.worker_id, s.finished_at
FROM groups g
JOIN samples s ON s.group_id = g.group_id
WHERE g.run_id = :run_id AND g.purpose = 'train' AND g.step > :after_step
  AND s.state NOT IN ('superseded', 'poisoned', 'surplus')
ORDER BY g.step, g.group_id, s.sample_index;
