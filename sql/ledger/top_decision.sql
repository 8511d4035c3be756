-- One decision with its inputs.
SELECT id, at, policy, action, subject, code, cluster, reason, inputs FROM v_decisions WHERE id = :id;
