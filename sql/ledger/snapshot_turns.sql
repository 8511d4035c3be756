-- The turns of episodes that are open, in the order in which each episode asked for them.
SELECT u.group_id, u.episode_id, u.run_id, u.number, u.request, u.content, u.parent_id, u.prefix_len, u.prompt_tokens, u.prompt_sha256,
       u.begun_at
FROM turns u
JOIN episodes e ON e.episode_id = u.episode_id AND e.state = 'open'
JOIN runs r ON r.run_id = e.run_id AND r.state = 'active'
ORDER BY u.episode_id, u.number;
