-- Complete samples of turns of episodes that are open: what a later turn may begin with.
SELECT t.sample_id, t.sha256
FROM turn_samples t
JOIN samples s ON s.sample_id = t.sample_id
JOIN turns u ON u.group_id = s.group_id
JOIN episodes e ON e.episode_id = u.episode_id AND e.state = 'open'
JOIN runs r ON r.run_id = e.run_id AND r.state = 'active'
ORDER BY t.sample_id;
