-- The first tokens and logprobs of some samples, in the order of each completion: of each sample no more than `most` tokens.
SELECT sample_id, start_len, substr(tokens, 1, CAST(4 * (:most - start_len) AS integer)) AS tokens,
       substr(logprobs, 1, CAST(4 * (:most - start_len) AS integer)) AS logprobs,
       substr(raw_logprobs, 1, CAST(4 * (:most - start_len) AS integer)) AS raw_logprobs
FROM chunks WHERE sample_id IN :sample_ids AND start_len < :most ORDER BY sample_id, start_len;
