-- One sample, its prompt, its run and the tokenizer that reads it.
SELECT s.sample_id, r.name AS run, r.tokenizer, s.group_id, g.purpose, g.step, g.prompt_index, g.take, s.sample_index, s.state, s.finish,
       s.accepted_len, g.prompt
FROM samples s
JOIN groups g ON g.group_id = s.group_id
JOIN runs r ON r.run_id = s.run_id
WHERE s.sample_id = :sample_id;
