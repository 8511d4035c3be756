-- How far trainer and engine were apart at each of the first tokens of some samples, packed float16, as of the newest step that trained them.
SELECT sample_id, n_tokens, substr(differences, 1, CAST(2 * :most AS integer)) AS differences
FROM token_differences WHERE id IN (SELECT max(id) FROM token_differences WHERE sample_id IN :sample_ids GROUP BY sample_id);
