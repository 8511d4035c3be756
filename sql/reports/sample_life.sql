-- What happened to one sample, from its prompt to the gradient? (The one that moved most often; for another, put its id into "chosen".)
WITH chosen (sample_id) AS (
    SELECT sample_id FROM v_samples ORDER BY moves DESC, CASE WHEN ended_at IS NULL THEN 1 ELSE 0 END, sample_id DESC LIMIT 1
),
-- The commits that used it: more than one where a trainer went back to a checkpoint and used it again.
uses AS (
    SELECT s.sample_id, s.run_id, e.step, e.attempt, e.at
    FROM v_sample_ends e
    JOIN chosen c ON c.sample_id = e.sample_id
    JOIN v_samples s ON s.sample_id = e.sample_id
    WHERE e.state = 'consumed'
),
life (sample_id, at, rank, what, who, detail) AS (
    SELECT s.sample_id, g.created_at, 0, 'prompt submitted', r.name,
           g.purpose || ' step ' || CAST(g.step AS text) || ', prompt ' || CAST(g.prompt_index AS text)
           || ', retry ' || CAST(g.retry AS text) || ', sample ' || CAST(s.sample_index AS text)
           || ' of ' || CAST(g.n AS text) || ' in group ' || CAST(g.group_id AS text) || ', version ' || CAST(g.created_version AS text)
    FROM v_samples s JOIN chosen c ON c.sample_id = s.sample_id JOIN v_groups g ON g.group_id = s.group_id JOIN v_runs r ON r.run_id = s.run_id
    UNION ALL
    SELECT l.sample_id, l.granted_at, 1, 'leased', COALESCE(w.kind || ' worker ' || CAST(w.worker_id AS text) || ' on ' || w.node, ''),
           'epoch ' || CAST(l.epoch AS text) || ' after ' || CAST(l.start_len AS text) || ' tokens, version ' || CAST(l.version AS text)
           || COALESCE(', job ' || CAST(w.job_id AS text), '')
    FROM v_leases l JOIN chosen c ON c.sample_id = l.sample_id LEFT JOIN v_workers w ON w.worker_id = l.worker_id
    UNION ALL
    SELECT k.sample_id, max(k.at), 2, 'tokens accepted', COALESCE(max(w.engine) || ' on ' || max(w.node), ''),
           'epoch ' || CAST(k.epoch AS text) || ', ' || CAST(sum(k.n_tokens) AS text) || ' tokens in ' || CAST(count(*) AS text)
           || ' chunks, version ' || CAST(k.version AS text)
    FROM v_chunks k JOIN chosen c ON c.sample_id = k.sample_id LEFT JOIN v_workers w ON w.worker_id = k.worker_id
    GROUP BY k.sample_id, k.epoch, k.version
    UNION ALL
    SELECT l.sample_id, l.ended_at, 3, 'lease ended', l.reason,
           'epoch ' || CAST(l.epoch AS text) || ' at ' || CAST(l.end_len AS text) || ' tokens, ' || CAST(l.regenerated AS text) || ' to generate again'
    FROM v_leases l JOIN chosen c ON c.sample_id = l.sample_id
    WHERE l.ended_at IS NOT NULL
    UNION ALL
    SELECT s.sample_id, s.finished_at, 4, 'complete', s.finish, CAST(s.accepted_len AS text) || ' tokens'
    FROM v_samples s JOIN chosen c ON c.sample_id = s.sample_id
    WHERE s.finished_at IS NOT NULL
    UNION ALL
    SELECT s.sample_id, g.delivered_at, 5, 'group delivered', '', 'attempt ' || CAST(g.delivered_attempt AS text)
    FROM v_samples s JOIN chosen c ON c.sample_id = s.sample_id JOIN v_groups g ON g.group_id = s.group_id
    WHERE g.delivered_at IS NOT NULL
    UNION ALL
    SELECT e.sample_id, e.at, 6, e.state, e.reason,
           'step ' || CAST(e.step AS text) || ', attempt ' || CAST(e.attempt AS text)
           || COALESCE(', reward ' || CAST(round(CAST(e.reward AS numeric), 4) AS text), '')
           || COALESCE(', advantage ' || CAST(round(CAST(e.advantage AS numeric), 4) AS text), '')
    FROM v_sample_ends e JOIN chosen c ON c.sample_id = e.sample_id
    UNION ALL
    SELECT u.sample_id, t.committed_at, 7, 'step committed',
           CASE WHEN t.rewound_by IS NULL THEN 'survives' ELSE 'undone by attempt ' || CAST(t.rewound_by AS text) END,
           'step ' || CAST(t.step AS text) || ', attempt ' || CAST(t.attempt AS text) || ', on version ' || CAST(t.version AS text)
    FROM uses u
    JOIN v_steps t ON t.run_id = u.run_id AND t.purpose = 'train' AND t.step = u.step AND t.attempt = u.attempt
    UNION ALL
    SELECT u.sample_id, v.published_at, 8, 'weights published', '', 'version ' || CAST(v.version AS text) || ' of step ' || CAST(v.step AS text)
           || ', attempt ' || CAST(v.attempt AS text)
    FROM uses u
    JOIN v_weight_versions v ON v.run_id = u.run_id AND v.step = u.step AND v.attempt = u.attempt
    UNION ALL
    -- The first checkpoint that has the step: written since, and by no attempt that had gone back before it.
    SELECT u.sample_id, k.recorded_at, 9, 'checkpoint written',
           CASE WHEN k.rewound_by IS NULL THEN 'survives' ELSE 'undone by attempt ' || CAST(k.rewound_by AS text) END,
           'step ' || CAST(k.step AS text) || ', ' || k.path
    FROM uses u
    JOIN v_checkpoints k ON k.run_id = u.run_id AND k.id = (
        SELECT min(f.id) FROM v_checkpoints f
        WHERE f.run_id = u.run_id AND f.step >= u.step AND f.recorded_at >= u.at
          AND f.recorded_at < COALESCE((SELECT min(a.started_at) FROM v_attempts a WHERE a.run_id = u.run_id AND a.attempt > u.attempt), f.recorded_at + 1)
    )
)
SELECT sample_id, round(CAST(at AS numeric), 3) AS at_unix_s, what, who, detail
FROM life
ORDER BY at, rank;
