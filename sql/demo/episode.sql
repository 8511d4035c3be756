-- The turns of one training episode: one that got its reward with turns that moved between engines, else the one that moved most.
WITH chosen AS (
    SELECT u.episode_id
    FROM turns u JOIN samples s ON s.group_id = u.group_id
    WHERE s.state IN ('consumed', 'filtered', 'masked')
    GROUP BY u.episode_id
    ORDER BY CASE WHEN sum(s.moves) > 0 AND max(s.reward) > 0 THEN 1 ELSE 0 END DESC, sum(s.moves) DESC, count(*) DESC, u.episode_id
    LIMIT 1
)
SELECT t.episode, t.number, t.group_id, t.sample_id, t.parent_id, t.prefix_len, t.prompt_tokens, s.reward, s.advantage,
       t.between_s, t.queue_s, t.model_s, t.moves
FROM v_episode_turns t
JOIN chosen c ON c.episode_id = t.episode_id
JOIN samples s ON s.sample_id = t.sample_id
ORDER BY t.number, t.sample_index
