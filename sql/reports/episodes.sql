-- What did agents' episodes do, turn by turn: tokens, seconds in queue and model and between calls, engines, tokens generated again? (The newest turns; "bounds": how many, of which Unix seconds.)
-- One row a sample. "how": begins, goes on from all that an earlier turn said ("after"), or branches: the agent rewrote its history
-- there, or went on from there before. "between_s", the agent's and its tools' time: to this call from the last token of the turn
-- that it goes on from whole, or else of the episode's turn that had ended last.
WITH bounds AS (SELECT 1000 AS most, 0.0 AS since, 9999999999.0 AS until),
newest AS (
    SELECT * FROM v_episode_turns WHERE begun_at >= (SELECT since FROM bounds) AND begun_at < (SELECT until FROM bounds)
    ORDER BY sample_id DESC LIMIT (SELECT most FROM bounds)
),
goes_on AS (
    SELECT parent_id, min(group_id) AS first_group FROM v_episode_turns WHERE continues = 'completion' GROUP BY parent_id
),
moments AS (
    SELECT u.episode_id, 0 AS sample_id, s.finished_at AS at, s.finished_at AS ended_at
    FROM v_turns u
    JOIN v_samples s ON s.group_id = u.group_id
    WHERE u.episode_id IN (SELECT episode_id FROM newest) AND s.finished_at IS NOT NULL
    UNION ALL
    SELECT episode_id, sample_id, begun_at, NULL FROM newest
),
before AS (
    SELECT sample_id, max(ended_at) OVER (PARTITION BY episode_id ORDER BY at, sample_id DESC ROWS UNBOUNDED PRECEDING) AS ended_at
    FROM moments
),
held AS (
    SELECT l.sample_id, count(DISTINCT l.worker_id) AS engines FROM v_leases l JOIN newest n ON n.sample_id = l.sample_id GROUP BY l.sample_id
)
SELECT r.name AS run, t.episode, e.state AS episode_state, t.number AS turn, t.sample_index AS choice,
       CASE WHEN t.number = 1 THEN 'begins' WHEN t.parent_id = 0 THEN 'begins anew' WHEN o.first_group IS NOT NULL THEN 'goes on'
            ELSE 'branches' END AS how,
       t.parent_number AS after, t.prompt_tokens, t.added_tokens, t.completion_tokens, t.state, t.finish,
       round(CAST(CASE WHEN t.continues = 'completion' THEN t.between_s ELSE t.begun_at - b.ended_at END AS numeric), 3) AS between_s, round(CAST(t.queue_s AS numeric), 3) AS queue_s,
       round(CAST(t.model_s AS numeric), 3) AS model_s, COALESCE(h.engines, 0) AS engines, t.moves, t.regenerated AS tokens_regenerated,
       CAST(t.begun_at AS bigint) AS begun_at_unix_s, t.sample_id
FROM newest t
JOIN v_runs r ON r.run_id = t.run_id
JOIN v_episodes e ON e.episode_id = t.episode_id
LEFT JOIN goes_on o ON o.first_group = t.group_id
LEFT JOIN before b ON b.sample_id = t.sample_id
LEFT JOIN held h ON h.sample_id = t.sample_id
ORDER BY t.episode_id, t.number, t.sample_index;
