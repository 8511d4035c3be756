-- The chunks of some samples with each sample's accepted length; one row without a chunk for a sample that has none.
SELECT s.sample_id, s.accepted_len, c.start_len, c.tokens, c.logprobs, c.raw_logprobs, c.routing
FROM samples s
LEFT JOIN chunks c ON c.sample_id = s.sample_id
WHERE s.sample_id IN :sample_ids;
