-- The tokens and logprobs of some samples, in the order of each completion.
SELECT sample_id, start_len, tokens, logprobs, raw_logprobs FROM chunks WHERE sample_id IN :sample_ids ORDER BY sample_id, start_len;
