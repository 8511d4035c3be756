-- The chunks of one sample, in the order of its answer.
SELECT start_len, tokens, logprobs, raw_logprobs FROM chunks WHERE sample_id = :sample_id ORDER BY start_len;
