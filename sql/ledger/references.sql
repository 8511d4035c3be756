-- How many rows name a row that is not there, or contradict one? (The schema has no foreign keys; see schema.py.)
SELECT 'samples without their group' AS what, count(*) AS n
FROM samples s LEFT JOIN groups g ON g.group_id = s.group_id AND g.run_id = s.run_id WHERE g.group_id IS NULL
UNION ALL
SELECT 'groups without their run', count(*) FROM groups g LEFT JOIN runs r ON r.run_id = g.run_id WHERE r.run_id IS NULL
UNION ALL
SELECT 'groups whose samples are not all there', count(*) FROM groups g
WHERE g.n <> (SELECT count(*) FROM samples s WHERE s.group_id = g.group_id)
UNION ALL
SELECT 'leases without their sample', count(*) FROM leases l LEFT JOIN samples s ON s.sample_id = l.sample_id WHERE s.sample_id IS NULL
UNION ALL
SELECT 'leases to a worker that never joined', count(*)
FROM leases l LEFT JOIN workers w ON w.worker_id = l.worker_id WHERE w.worker_id IS NULL
UNION ALL
SELECT 'leases still open on a sample that is complete or ended', count(*)
FROM samples s JOIN leases l ON l.sample_id = s.sample_id AND l.ended_at IS NULL WHERE s.state <> 'open'
UNION ALL
SELECT 'samples with more than one open lease', count(*)
FROM (SELECT sample_id FROM leases WHERE ended_at IS NULL GROUP BY sample_id HAVING count(*) > 1) twice
UNION ALL
SELECT 'samples whose epoch is not their newest lease', count(*)
FROM samples s WHERE s.epoch <> COALESCE((SELECT max(l.epoch) FROM leases l WHERE l.sample_id = s.sample_id), 0)
UNION ALL
SELECT 'samples consumed before they were complete', count(*) FROM samples WHERE state = 'consumed' AND finish = ''
UNION ALL
SELECT 'groups without their prompt that were not purged', count(*)
FROM groups g
WHERE length(g.prompt) = 0 AND EXISTS (SELECT 1 FROM samples s WHERE s.group_id = g.group_id AND COALESCE(s.contents, '') <> 'purged')
  AND NOT EXISTS (SELECT 1 FROM turns u WHERE u.group_id = g.group_id AND u.prefix_len = u.prompt_tokens)
UNION ALL
SELECT 'turns without their group', count(*)
FROM turns u LEFT JOIN groups g ON g.group_id = u.group_id AND g.run_id = u.run_id WHERE g.group_id IS NULL
UNION ALL
SELECT 'turns without their episode', count(*)
FROM turns u LEFT JOIN episodes e ON e.episode_id = u.episode_id AND e.run_id = u.run_id WHERE e.episode_id IS NULL
UNION ALL
SELECT 'turns whose parent is no sample of an earlier turn of their episode', count(*)
FROM turns u
LEFT JOIN samples p ON p.sample_id = u.parent_id
LEFT JOIN turns o ON o.group_id = p.group_id
WHERE u.parent_id <> 0 AND (o.group_id IS NULL OR o.episode_id <> u.episode_id OR o.number >= u.number)
UNION ALL
SELECT 'turns that share more with their parent than it has', count(*)
FROM turns u
JOIN samples p ON p.sample_id = u.parent_id
JOIN turns o ON o.group_id = p.group_id
WHERE u.prefix_len > o.prompt_tokens + p.accepted_len
UNION ALL
SELECT 'turns whose prompt has another length than what they share and add', count(*)
FROM turns u
JOIN groups g ON g.group_id = u.group_id
WHERE u.prompt_tokens <> u.prefix_len + COALESCE(g.purged_prompt_tokens, length(g.prompt) / 4)
UNION ALL
SELECT 'sequences of turns without their sample', count(*)
FROM turn_samples t LEFT JOIN samples s ON s.sample_id = t.sample_id WHERE s.sample_id IS NULL
UNION ALL
SELECT 'differences of tokens without their sample, or of another number of tokens than it has', count(*)
FROM token_differences d LEFT JOIN samples s ON s.sample_id = d.sample_id
WHERE s.sample_id IS NULL OR d.n_tokens <> s.accepted_len OR length(d.differences) NOT IN (0, 2 * d.n_tokens)
UNION ALL
SELECT 'calls of tools without their episode', count(*)
FROM tool_calls c LEFT JOIN episodes e ON e.episode_id = c.episode_id AND e.run_id = c.run_id WHERE e.episode_id IS NULL
UNION ALL
SELECT 'deliveries without their episode', count(*)
FROM deliveries d LEFT JOIN episodes e ON e.episode_id = d.episode_id AND e.run_id = d.run_id WHERE e.episode_id IS NULL
UNION ALL
SELECT 'delivered turns that are no turns of their delivery''s episode', count(*)
FROM delivered_turns o
LEFT JOIN deliveries d ON d.delivery_id = o.delivery_id
LEFT JOIN turns u ON u.group_id = o.group_id
WHERE d.delivery_id IS NULL OR u.group_id IS NULL OR u.episode_id <> d.episode_id
UNION ALL
SELECT 'episodes that were delivered more than once', count(*)
FROM (SELECT episode_id FROM deliveries GROUP BY episode_id HAVING count(*) > 1) twice
UNION ALL
SELECT 'workers without their run', count(*) FROM workers w LEFT JOIN runs r ON r.run_id = w.run_id WHERE r.run_id IS NULL
UNION ALL
SELECT 'steps of an attempt that was never granted', count(*)
FROM steps t LEFT JOIN attempts a ON a.run_id = t.run_id AND a.attempt = t.attempt WHERE a.run_id IS NULL
UNION ALL
SELECT 'generations of which more than one may write', count(*) - 1
FROM generations WHERE superseded_at IS NULL HAVING count(*) > 1;
