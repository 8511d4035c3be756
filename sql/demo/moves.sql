-- What became of the training samples (of agents: the turns of their training episodes), how many of them moved with tokens from one engine to another, and the most moves of one sample.
SELECT count(*) AS samples, coalesce(sum(CASE WHEN s.state = 'consumed' THEN 1 ELSE 0 END), 0) AS trained,
       coalesce(sum(CASE WHEN s.state = 'filtered' THEN 1 ELSE 0 END), 0) AS filtered,
       coalesce(sum(CASE WHEN s.moves > 0 THEN 1 ELSE 0 END), 0) AS moved, coalesce(max(s.moves), 0) AS most
FROM samples s JOIN groups g ON g.group_id = s.group_id
WHERE g.purpose IN ('train', 'turn') AND s.state IN ('consumed', 'filtered', 'masked')
