-- One sample: where it belongs and what became of it.
SELECT s.sample_id, r.name AS run, r.tokenizer, g.purpose, g.step, g.prompt_index, g.retry, s.sample_index, g.n, g.version, g.prompt_tokens,
       s.state, s.reason, s.finish, s.accepted_len, s.epoch, s.moves, s.regenerated, s.reward, s.advantage, s.ended_step, s.contents
FROM v_samples s
JOIN v_groups g ON g.group_id = s.group_id
JOIN v_runs r ON r.run_id = s.run_id
WHERE s.sample_id = :sample_id;
