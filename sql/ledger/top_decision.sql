-- One decision with its inputs, of these at most 256 Ki characters.
SELECT id, at, policy, action, subject, code, cluster, reason, substr(inputs, 1, 262144) AS inputs FROM v_decisions WHERE id = :id;
