-- Episodes of runs that have not ended: those that are open, and the newest that ended, whose requests are not taken again.
SELECT episode_id, run_id, name, state, begun_at, delivered, spent_turns, spent_tokens FROM (
    SELECT e.episode_id, e.run_id, e.name, e.state, e.begun_at, e.spent_turns, e.spent_tokens,
           EXISTS (SELECT 1 FROM deliveries d WHERE d.episode_id = e.episode_id) AS delivered,
           row_number() OVER (PARTITION BY e.run_id, CASE WHEN e.state = 'open' THEN 1 ELSE 0 END ORDER BY e.episode_id DESC) AS nth
    FROM episodes e
    JOIN runs r ON r.run_id = e.run_id AND r.state = 'active'
) numbered
WHERE state = 'open' OR nth <= 65536
ORDER BY episode_id;
