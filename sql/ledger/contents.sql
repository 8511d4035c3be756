-- Do the payloads agree with what retention and purges say they left? (No row: yes. Lengths and offsets are exactly_once's.)
SELECT CASE WHEN s.contents IN ('dropped', 'purged') THEN 'dropped or purged, but its tokens are there' ELSE 'payload differs from its tokens' END,
       s.run_id, s.sample_id,
       'at ' || CAST(c.start_len AS text) || ', ' || CAST(c.n_tokens AS text) || ' tokens in ' || CAST(length(c.tokens) AS text) || ', '
       || CAST(length(c.logprobs) AS text) || ' and ' || CAST(length(c.raw_logprobs) AS text) || ' bytes'
FROM chunks c
JOIN samples s ON s.sample_id = c.sample_id
WHERE length(c.tokens) <> CASE WHEN s.contents IN ('dropped', 'purged') THEN 0 ELSE 4 * c.n_tokens END
   OR length(c.logprobs) <> length(c.tokens) OR length(c.raw_logprobs) <> length(c.tokens)
UNION ALL
SELECT 'compacted, but in several rows of one lease', s.run_id, s.sample_id,
       'epoch ' || CAST(c.epoch AS text) || ', ' || CAST(count(*) AS text) || ' rows'
FROM samples s
JOIN chunks c ON c.sample_id = s.sample_id
WHERE s.contents IN ('compacted', 'dropped')
GROUP BY s.run_id, s.sample_id, c.epoch, c.version, c.worker_id
HAVING count(*) > 1
UNION ALL
SELECT 'dropped before its end', s.run_id, s.sample_id, s.state
FROM samples s
WHERE s.contents = 'dropped' AND s.state IN ('open', 'complete')
UNION ALL
SELECT 'left behind by a purge of its run', s.run_id, s.sample_id, COALESCE(s.contents, 'tokens') || ' and a prompt of '
       || CAST(length(g.prompt) AS text) || ' bytes'
FROM runs r
JOIN groups g ON g.run_id = r.run_id AND g.created_at <= r.purged_at
JOIN samples s ON s.group_id = g.group_id
WHERE r.purged_at IS NOT NULL AND (COALESCE(s.contents, '') <> 'purged' OR length(g.prompt) > 0)
ORDER BY 1, 2, 3;
