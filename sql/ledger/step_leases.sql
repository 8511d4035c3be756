-- Who generated the samples of a step, lease by lease; all prompts when prompt_index is null.
SELECT l.sample_id, l.epoch, l.start_len, l.end_len, l.reason, l.ended_at, s.accepted_len, l.worker_id, w.kind, w.node, w.job_id
FROM groups g
JOIN samples s ON s.group_id = g.group_id
JOIN leases l ON l.sample_id = s.sample_id
LEFT JOIN workers w ON w.worker_id = l.worker_id
WHERE g.run_id = :run_id AND g.purpose = :purpose AND g.step = :step
  AND (CAST(:prompt_index AS bigint) IS NULL OR g.prompt_index = CAST(:prompt_index AS bigint))
ORDER BY l.sample_id, l.epoch;
