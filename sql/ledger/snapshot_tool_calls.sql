-- Calls of tools with effects outside, of episodes that are open, in their order.
SELECT c.call_id, c.episode_id, c.call, c.tool, c.asker, c.answer
FROM tool_calls c
JOIN episodes e ON e.episode_id = c.episode_id AND e.state = 'open'
JOIN runs r ON r.run_id = e.run_id AND r.state = 'active'
ORDER BY c.call_id;
