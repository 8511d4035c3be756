-- How many samples moved with tokens from one engine to another, and the most moves of one sample.
SELECT count(*) AS samples, coalesce(sum(CASE WHEN moves > 0 THEN 1 ELSE 0 END), 0) AS moved, coalesce(max(moves), 0) AS most
FROM samples WHERE state IN ('consumed', 'filtered', 'masked')
