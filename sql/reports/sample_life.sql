-- What happened to one sample, from its prompt to the gradient? (The one that moved most often; for another, put its id into "chosen".)
WITH chosen (sample_id) AS (
    SELECT sample_id FROM samples ORDER BY moves DESC, CASE WHEN ended_at IS NULL THEN 1 ELSE 0 END, sample_id DESC LIMIT 1
),
life (sample_id, at, rank, what, who, detail) AS (
    SELECT s.sample_id, g.created_at, 0, 'prompt submitted', r.name,
           g.purpose || ' step ' || CAST(g.step AS text) || ', prompt ' || CAST(g.prompt_index AS text) || ', take '
           || CAST(g.take AS text) || ', sample ' || CAST(s.sample_index AS text) || ' of ' || CAST(g.n AS text)
           || ', version ' || CAST(g.created_version AS text)
    FROM samples s JOIN chosen c ON c.sample_id = s.sample_id JOIN groups g ON g.group_id = s.group_id JOIN runs r ON r.run_id = s.run_id
    UNION ALL
    SELECT l.sample_id, l.granted_at, 1, 'leased', COALESCE(w.kind || ' worker ' || CAST(w.worker_id AS text) || ' on ' || w.node, ''),
           'epoch ' || CAST(l.epoch AS text) || ' after ' || CAST(l.start_len AS text) || ' tokens, version ' || CAST(l.version AS text)
    FROM leases l JOIN chosen c ON c.sample_id = l.sample_id LEFT JOIN workers w ON w.worker_id = l.worker_id
    UNION ALL
    SELECT k.sample_id, max(k.at), 2, 'tokens accepted', '',
           'epoch ' || CAST(k.epoch AS text) || ', ' || CAST(sum(k.n_tokens) AS text) || ' tokens in ' || CAST(count(*) AS text) || ' chunks'
    FROM chunks k JOIN chosen c ON c.sample_id = k.sample_id
    GROUP BY k.sample_id, k.epoch
    UNION ALL
    SELECT l.sample_id, l.ended_at, 3, 'lease ended', l.reason,
           'epoch ' || CAST(l.epoch AS text) || ' at ' || CAST(l.end_len AS text) || ' tokens, ' || CAST(l.regenerated AS text) || ' to generate again'
    FROM leases l JOIN chosen c ON c.sample_id = l.sample_id
    WHERE l.ended_at IS NOT NULL
    UNION ALL
    SELECT s.sample_id, s.finished_at, 4, 'complete', s.finish, CAST(s.accepted_len AS text) || ' tokens'
    FROM samples s JOIN chosen c ON c.sample_id = s.sample_id
    WHERE s.finished_at IS NOT NULL
    UNION ALL
    SELECT s.sample_id, g.delivered_at, 5, 'group delivered', '', 'attempt ' || CAST(g.delivered_attempt AS text)
    FROM samples s JOIN chosen c ON c.sample_id = s.sample_id JOIN groups g ON g.group_id = s.group_id
    WHERE g.delivered_at IS NOT NULL
    UNION ALL
    SELECT e.sample_id, e.at, 6, e.state, e.reason,
           'step ' || CAST(e.step AS text) || ', attempt ' || CAST(e.attempt AS text)
           || COALESCE(', reward ' || CAST(round(CAST(e.reward AS numeric), 4) AS text), '')
           || COALESCE(', advantage ' || CAST(round(CAST(e.advantage AS numeric), 4) AS text), '')
    FROM sample_ends e JOIN chosen c ON c.sample_id = e.sample_id
)
SELECT sample_id, round(CAST(at AS numeric), 3) AS at_unix_s, what, who, detail
FROM life
ORDER BY at, rank;
