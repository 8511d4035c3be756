-- How many complete samples moved to another engine in mid-completion, how often at most, and how many tokens went with them?
SELECT r.name AS run, g.purpose, count(*) AS samples, CAST(sum(CASE WHEN s.moves > 0 THEN 1 ELSE 0 END) AS bigint) AS moved,
       round(CAST(100.0 * sum(CASE WHEN s.moves > 0 THEN 1 ELSE 0 END) / count(*) AS numeric), 1) AS moved_percent,
       max(s.moves) AS most_moves, CAST(sum(s.accepted_len) AS bigint) AS tokens, CAST(sum(s.regenerated) AS bigint) AS tokens_regenerated
FROM v_samples s
JOIN v_groups g ON g.group_id = s.group_id
JOIN v_runs r ON r.run_id = s.run_id
WHERE s.state <> 'open'
GROUP BY r.name, g.purpose
ORDER BY r.name, g.purpose;
