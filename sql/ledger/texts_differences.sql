-- How far trainer and engine were apart at each token of some samples, packed float16, as of each step that trained them.
SELECT sample_id, differences FROM token_differences WHERE sample_id IN :sample_ids ORDER BY id;
