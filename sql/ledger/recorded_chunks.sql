-- The accepted chunks of a run's training steps after `after_step` - which worker generated which tokens of a sample, and when. Only those
-- among the ledger's newest `most` chunks, of samples whose contents were neither joined nor dropped since.
SELECT c.sample_id, c.worker_id, c.start_len, c.n_tokens, c.at
FROM chunks c
JOIN samples s ON s.sample_id = c.sample_id
JOIN groups g ON g.group_id = s.group_id
WHERE c.id > (SELECT COALESCE(max(id), 0) FROM chunks) - :most AND s.contents IS NULL
  AND g.run_id = :run_id AND g.purpose = 'train' AND g.step > :after_step
ORDER BY c.id;
