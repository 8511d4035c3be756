-- Do leases, ends, groups, versions and steps contradict each other, or name what never was? (No row: no.)
-- Each part is one pass over a table with look-ups by key, or a sort of one. By position, not by time: clocks differ between hosts.
WITH chain AS (
    SELECT sample_id, epoch, start_len, end_len, ended_at,
           COALESCE(lag(end_len) OVER (PARTITION BY sample_id ORDER BY epoch), 0) AS expected,
           COALESCE(lag(epoch) OVER (PARTITION BY sample_id ORDER BY epoch), 0) + 1 AS expected_epoch
    FROM v_leases
),
surviving AS (SELECT run_id, step, attempt FROM v_steps WHERE purpose = 'train' AND rewound_by IS NULL),
ends AS (
    SELECT sample_id, state, step, attempt, row_number() OVER (PARTITION BY sample_id ORDER BY id DESC) AS nth FROM v_sample_ends
),
with_last_end AS (
    SELECT s.run_id, s.sample_id, s.state, s.ended_step, s.ended_attempt, e.state AS last, e.step, e.attempt
    FROM v_samples s
    LEFT JOIN ends e ON e.sample_id = s.sample_id AND e.nth = 1
)
SELECT 'tokens beyond their lease' AS problem, s.run_id, s.sample_id,
       'epoch ' || CAST(c.epoch AS text) || ' from ' || CAST(l.start_len AS text) || ' to '
       || CASE WHEN l.ended_at IS NULL THEN 'now' ELSE CAST(l.end_len AS text) END || ', a chunk of it from '
       || CAST(c.start_len AS text) || ' to ' || CAST(c.start_len + c.n_tokens AS text) AS detail
FROM v_chunks c
JOIN v_leases l ON l.sample_id = c.sample_id AND l.epoch = c.epoch
JOIN v_samples s ON s.sample_id = c.sample_id
WHERE c.start_len < l.start_len OR (l.ended_at IS NOT NULL AND c.start_len + c.n_tokens > l.end_len)
UNION ALL
SELECT 'lease does not follow the one before', s.run_id, s.sample_id,
       'epoch ' || CAST(h.epoch AS text) || ' at ' || CAST(h.start_len AS text) || ', not epoch ' || CAST(h.expected_epoch AS text)
       || ' at ' || CAST(h.expected AS text)
FROM chain h
JOIN v_samples s ON s.sample_id = h.sample_id
WHERE h.start_len <> h.expected OR h.epoch <> h.expected_epoch
UNION ALL
SELECT 'accepted length differs from its last lease', s.run_id, s.sample_id,
       CAST(s.accepted_len AS text) || ' accepted, the lease ended at ' || CAST(COALESCE(l.end_len, 0) AS text)
FROM v_samples s
LEFT JOIN v_leases l ON l.sample_id = s.sample_id AND l.epoch = s.epoch
WHERE (l.sample_id IS NULL OR l.ended_at IS NOT NULL) AND s.accepted_len <> COALESCE(l.end_len, 0)
UNION ALL
SELECT 'moves differ from its leases', s.run_id, s.sample_id, CAST(s.moves AS text) || ' moves, ' || CAST(n.n AS text) || ' in leases'
FROM (SELECT sample_id, sum(CASE WHEN start_len > 0 THEN 1 ELSE 0 END) AS n FROM v_leases GROUP BY sample_id) n
JOIN v_samples s ON s.sample_id = n.sample_id
WHERE s.moves <> n.n
UNION ALL
SELECT 'lease at a worker of another run', s.run_id, s.sample_id,
       'epoch ' || CAST(l.epoch AS text) || ', worker ' || CAST(w.worker_id AS text) || ' of run ' || CAST(w.run_id AS text)
FROM v_leases l
JOIN v_samples s ON s.sample_id = l.sample_id
JOIN v_workers w ON w.worker_id = l.worker_id
WHERE w.run_id <> s.run_id
UNION ALL
SELECT 'state differs from its last end', t.run_id, t.sample_id,
       t.state || ' (step ' || CAST(t.ended_step AS text) || ', attempt ' || CAST(t.ended_attempt AS text) || '), '
       || COALESCE('the last end: ' || t.last || ' (step ' || CAST(t.step AS text) || ', attempt ' || CAST(t.attempt AS text) || ')',
                   'but it has no end')
FROM with_last_end t
WHERE CASE WHEN t.last IS NULL THEN t.state NOT IN ('open', 'complete') OR t.ended_step <> 0 OR t.ended_attempt <> 0
           WHEN t.last = 'reopened' THEN t.state <> 'complete' OR t.ended_step <> 0 OR t.ended_attempt <> 0
           ELSE t.state <> t.last OR t.ended_step <> t.step OR t.ended_attempt <> t.attempt END
UNION ALL
SELECT 'consumed by a step that was never committed', s.run_id, e.sample_id,
       'step ' || CAST(e.step AS text) || ', attempt ' || CAST(e.attempt AS text)
FROM v_sample_ends e
JOIN v_samples s ON s.sample_id = e.sample_id
WHERE e.state = 'consumed'
  AND NOT EXISTS (
      SELECT 1 FROM v_steps t WHERE t.run_id = s.run_id AND t.purpose = 'train' AND t.step = e.step AND t.attempt = e.attempt
  )
UNION ALL
SELECT 'consumed without a token', s.run_id, s.sample_id, 'step ' || CAST(s.ended_step AS text)
FROM v_samples s
WHERE s.state = 'consumed' AND s.accepted_len = 0
UNION ALL
SELECT 'one position of the data consumed twice', s.run_id, max(s.sample_id),
       'step ' || CAST(g.step AS text) || ', prompt ' || CAST(g.prompt_index AS text) || ', index ' || CAST(s.sample_index AS text)
       || ': ' || CAST(count(*) AS text) || ' samples'
FROM v_samples s
JOIN v_groups g ON g.group_id = s.group_id AND g.purpose = 'train'
JOIN surviving v ON v.run_id = s.run_id AND v.step = s.ended_step AND v.attempt = s.ended_attempt
WHERE s.state = 'consumed'
GROUP BY s.run_id, g.step, g.prompt_index, s.sample_index
HAVING count(*) > 1
UNION ALL
SELECT 'one retry of a prompt twice', g.run_id, max(g.first_sample_id),
       'step ' || CAST(g.step AS text) || ', prompt ' || CAST(g.prompt_index AS text) || ', retry ' || CAST(g.retry AS text) || ': '
       || CAST(count(*) AS text) || ' groups'
FROM v_groups g
WHERE g.purpose = 'train'
GROUP BY g.run_id, g.step, g.prompt_index, g.retry
HAVING count(*) > 1
UNION ALL
SELECT 'two samples of a group with one index', s.run_id, max(s.sample_id), 'index ' || CAST(s.sample_index AS text)
FROM v_samples s
GROUP BY s.run_id, s.group_id, s.sample_index
HAVING count(*) > 1
UNION ALL
SELECT 'a lease of weights that were never published', s.run_id, s.sample_id,
       'epoch ' || CAST(l.epoch AS text) || ', version ' || CAST(l.version AS text)
FROM v_leases l
JOIN v_samples s ON s.sample_id = l.sample_id
WHERE NOT EXISTS (SELECT 1 FROM v_weight_versions w WHERE w.run_id = s.run_id AND w.version = l.version)
UNION ALL
SELECT 'a group of weights that were never published', g.run_id, g.first_sample_id,
       'made for version ' || CAST(g.created_version AS text) || ', now of ' || CAST(g.version AS text)
FROM v_groups g
WHERE NOT EXISTS (SELECT 1 FROM v_weight_versions w WHERE w.run_id = g.run_id AND w.version = g.version)
   OR NOT EXISTS (SELECT 1 FROM v_weight_versions w WHERE w.run_id = g.run_id AND w.version = g.created_version)
UNION ALL
SELECT 'a step of weights that were never published', t.run_id, 0, t.purpose || ' step ' || CAST(t.step AS text)
       || ', attempt ' || CAST(t.attempt AS text) || ', version ' || CAST(t.version AS text)
FROM v_steps t
WHERE NOT EXISTS (SELECT 1 FROM v_weight_versions w WHERE w.run_id = t.run_id AND w.version = t.version)
UNION ALL
SELECT 'its newest attempt was never granted', r.run_id, 0, 'attempt ' || CAST(r.attempt AS text)
FROM v_runs r
WHERE r.attempt > 0 AND NOT EXISTS (SELECT 1 FROM v_attempts a WHERE a.run_id = r.run_id AND a.attempt = r.attempt)
UNION ALL
SELECT 'its last step was never committed', r.run_id, 0, 'step ' || CAST(r.last_step AS text)
FROM v_runs r
WHERE r.last_step > r.resume_step AND NOT EXISTS (SELECT 1 FROM surviving v WHERE v.run_id = r.run_id AND v.step = r.last_step)
UNION ALL
SELECT 'written by no daemon: the ledger names no generation', min(r.run_id), 0, CAST(count(*) AS text) || ' runs'
FROM v_runs r
HAVING count(*) > 0 AND NOT EXISTS (SELECT 1 FROM v_generations)
ORDER BY 1, 2, 3;
