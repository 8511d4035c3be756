-- Which agents' episodes ended without a use, why, and what did they cost? (Of a life that was played again, its end counts here.)
-- Each one: SELECT * FROM v_episodes WHERE reason = '...'; its turns: the report episodes.
WITH generated AS (
    SELECT episode_id, count(DISTINCT group_id) AS turns, sum(completion_tokens) AS tokens,
           max(CASE WHEN state IN ('consumed', 'filtered', 'evaluated') THEN 1 ELSE 0 END) AS taken,
           max(CASE WHEN state = 'served' THEN 1 ELSE 0 END) AS served
    FROM v_episode_turns
    GROUP BY episode_id
)
SELECT r.name AS run, e.state, e.reason, count(*) AS episodes, CAST(COALESCE(sum(s.turns), 0) AS bigint) AS turns,
       CAST(COALESCE(sum(s.tokens), 0) AS bigint) AS tokens, round(CAST(sum(e.ended_at - e.begun_at) AS numeric), 1) AS seconds,
       max(e.name) AS one_of_them, count(DISTINCT e.worker) AS environment_workers
FROM v_episodes e
JOIN v_runs r ON r.run_id = e.run_id
LEFT JOIN generated s ON s.episode_id = e.episode_id
WHERE e.state <> 'open' AND COALESCE(s.taken, 0) = 0 AND (e.state = 'stopped' OR COALESCE(s.served, 0) = 0)
  AND (s.turns IS NOT NULL OR e.reason <> 'its gateway ended it')
GROUP BY r.name, e.state, e.reason
ORDER BY episodes DESC, r.name, e.reason;
