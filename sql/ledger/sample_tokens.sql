-- One sample with its prompt (once), its run's tokenizer and each of its chunks, in the order of the answer: one statement, one moment.
SELECT s.sample_id, r.name AS run, r.tokenizer, r.purged_at, s.group_id, g.purpose, g.step, g.prompt_index, g.retry, s.sample_index, s.state, s.finish,
       s.contents, s.accepted_len, CASE WHEN COALESCE(c.start_len, 0) = 0 THEN g.prompt END AS prompt, c.start_len, c.tokens, c.logprobs, c.raw_logprobs
FROM samples s
JOIN groups g ON g.group_id = s.group_id
JOIN runs r ON r.run_id = s.run_id
LEFT JOIN chunks c ON c.sample_id = s.sample_id
WHERE s.sample_id = :sample_id
ORDER BY c.start_len;
