-- What those leases brought, and when, as far as it lies among the ledger's newest chunks and is as it came.
SELECT c.sample_id, c.worker_id, c.start_len, c.n_tokens, c.at
FROM chunks c
JOIN samples s ON s.sample_id = c.sample_id
JOIN groups g ON g.group_id = s.group_id
WHERE c.id > (SELECT COALESCE(max(id), 0) FROM chunks) - :most AND s.contents IS NULL
  AND g.run_id = :run_id AND g.purpose = 'train' AND g.step > :after_step
ORDER BY c.id;
