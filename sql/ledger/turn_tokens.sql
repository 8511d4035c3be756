-- The token ids of some samples, in the order of each completion.
SELECT sample_id, tokens FROM chunks WHERE sample_id IN :sample_ids ORDER BY sample_id, start_len;
