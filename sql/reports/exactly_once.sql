-- Was any sample consumed twice, forgotten, or its tokens lost, doubled or taken from a stale lease? (No row: no.)
WITH surviving AS (SELECT run_id, step, attempt FROM v_steps WHERE purpose = 'train' AND rewound_by IS NULL),
joints AS (
    SELECT sample_id, start_len,
           COALESCE(lag(start_len + n_tokens) OVER (PARTITION BY sample_id ORDER BY start_len, id), 0) AS expected
    FROM v_chunks
),
lengths AS (SELECT sample_id, sum(n_tokens) AS n FROM v_chunks GROUP BY sample_id)
SELECT 'consumed by more than one surviving step' AS problem, s.run_id, s.sample_id, CAST(count(*) AS text) || ' steps' AS detail
FROM v_sample_ends e
JOIN v_samples s ON s.sample_id = e.sample_id
JOIN surviving v ON v.run_id = s.run_id AND v.step = e.step AND v.attempt = e.attempt
WHERE e.state = 'consumed'
GROUP BY s.run_id, s.sample_id
HAVING count(*) > 1
UNION ALL
SELECT 'of a committed step but without an end', s.run_id, s.sample_id, s.state || ', step ' || CAST(g.step AS text)
FROM v_samples s
JOIN v_groups g ON g.group_id = s.group_id AND g.purpose = 'train'
WHERE s.state IN ('open', 'complete')
  AND EXISTS (SELECT 1 FROM surviving v WHERE v.run_id = g.run_id AND v.step = g.step)
UNION ALL
SELECT 'consumed by a step that did not survive', s.run_id, s.sample_id, 'step ' || CAST(s.ended_step AS text)
FROM v_samples s
JOIN v_runs r ON r.run_id = s.run_id AND r.state = 'finished'
WHERE s.state = 'consumed'
  AND NOT EXISTS (SELECT 1 FROM surviving v WHERE v.run_id = s.run_id AND v.step = s.ended_step AND v.attempt = s.ended_attempt)
UNION ALL
SELECT 'superseded and not generated again', s.run_id, s.sample_id, 'step ' || CAST(g.step AS text)
FROM v_samples s
JOIN v_groups g ON g.group_id = s.group_id AND g.purpose = 'train'
JOIN v_runs r ON r.run_id = s.run_id AND r.state = 'finished'
WHERE s.state = 'superseded'
  AND NOT EXISTS (
      SELECT 1 FROM v_groups n
      WHERE n.run_id = g.run_id AND n.purpose = g.purpose AND n.step = g.step AND n.prompt_index = g.prompt_index AND n.group_id > g.group_id
  )
UNION ALL
SELECT CASE WHEN j.start_len > j.expected THEN 'tokens missing' ELSE 'tokens doubled' END, s.run_id, s.sample_id,
       'a chunk begins at ' || CAST(j.start_len AS text) || ', the one before ends at ' || CAST(j.expected AS text)
FROM joints j
JOIN v_samples s ON s.sample_id = j.sample_id
WHERE j.start_len <> j.expected
UNION ALL
SELECT 'accepted length differs from its chunks', s.run_id, s.sample_id,
       CAST(s.accepted_len AS text) || ' accepted, ' || CAST(COALESCE(n.n, 0) AS text) || ' in chunks'
FROM v_samples s
LEFT JOIN lengths n ON n.sample_id = s.sample_id
WHERE s.accepted_len <> COALESCE(n.n, 0)
UNION ALL
SELECT 'chunk outside its lease', COALESCE(s.run_id, 0), c.sample_id,
       'epoch ' || CAST(c.epoch AS text) || ' at ' || CAST(c.start_len AS text)
FROM v_chunks c
LEFT JOIN v_samples s ON s.sample_id = c.sample_id
LEFT JOIN v_leases l ON l.sample_id = c.sample_id AND l.epoch = c.epoch AND l.worker_id = c.worker_id AND l.version = c.version
WHERE l.sample_id IS NULL OR s.sample_id IS NULL
UNION ALL
SELECT CASE WHEN s.contents IN ('dropped', 'purged') THEN 'dropped or purged, but its tokens are there' ELSE 'payload differs from its tokens' END,
       s.run_id, s.sample_id,
       'at ' || CAST(c.start_len AS text) || ', ' || CAST(c.n_tokens AS text) || ' tokens in ' || CAST(c.token_bytes AS text) || ', '
       || CAST(c.logprob_bytes AS text) || ' and ' || CAST(c.raw_logprob_bytes AS text) || ' bytes'
FROM v_chunks c
JOIN v_samples s ON s.sample_id = c.sample_id
WHERE c.token_bytes <> CASE WHEN s.contents IN ('dropped', 'purged') THEN 0 ELSE 4 * c.n_tokens END
   OR c.logprob_bytes <> c.token_bytes OR c.raw_logprob_bytes <> c.token_bytes
UNION ALL
SELECT 'compacted, but in several rows of one lease', s.run_id, s.sample_id,
       'epoch ' || CAST(c.epoch AS text) || ', ' || CAST(count(*) AS text) || ' rows'
FROM v_samples s
JOIN v_chunks c ON c.sample_id = s.sample_id
WHERE s.contents IN ('compacted', 'dropped')
GROUP BY s.run_id, s.sample_id, c.epoch, c.version, c.worker_id
HAVING count(*) > 1
UNION ALL
SELECT 'dropped before its end', s.run_id, s.sample_id, s.state
FROM v_samples s
WHERE s.contents = 'dropped' AND s.state IN ('open', 'complete')
UNION ALL
SELECT 'left behind by a purge of its run', s.run_id, s.sample_id, COALESCE(s.contents, 'tokens') || ' and a prompt of '
       || CAST(g.prompt_bytes AS text) || ' bytes'
FROM v_runs r
JOIN v_groups g ON g.run_id = r.run_id AND g.created_at <= r.purged_at
JOIN v_samples s ON s.group_id = g.group_id
WHERE r.purged_at IS NOT NULL AND (COALESCE(s.contents, '') <> 'purged' OR g.prompt_bytes > 0)
ORDER BY 1, 2, 3;
