-- One decision with its inputs.
SELECT id, at, policy, action, subject, code, reason, inputs FROM v_decisions WHERE id = :id;
