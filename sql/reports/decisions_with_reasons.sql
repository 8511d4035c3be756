-- What was decided, when, and why?
SELECT id, CAST(at AS bigint) AS at_unix_s, policy, action, subject, code, reason, inputs
FROM v_decisions
ORDER BY id;
