-- The samples of a run's training steps after `after_step`, the step under way included - how long they are, which worker ended them, and
-- when they were asked for. Not those that were given up.
SELECT g.step, g.group_id, g.prompt_index, g.created_at, g.sampling, COALESCE(g.purged_prompt_tokens, length(g.prompt) / 4) AS prompt_tokens,
       s.sample_id, s.sample_index, s.accepted_len AS length, s.finish, s.state, s.worker_id, s.finished_at
FROM groups g
JOIN samples s ON s.group_id = g.group_id
WHERE g.run_id = :run_id AND g.purpose = 'train' AND g.step > :after_step
  AND s.state NOT IN ('superseded', 'poisoned', 'surplus')
ORDER BY g.step, g.group_id, s.sample_index;
