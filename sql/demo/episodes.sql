-- Episodes that were trained with, and their turns.
SELECT count(DISTINCT u.episode_id) AS episodes, count(*) AS turns
FROM turns u JOIN samples s ON s.group_id = u.group_id
WHERE s.state IN ('consumed', 'filtered', 'masked')
