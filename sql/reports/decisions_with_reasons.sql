-- What was decided, when, and why? (The newest; "bounds": how many, of which Unix seconds.)
WITH bounds AS (SELECT 1000 AS most, 0.0 AS since, 9999999999.0 AS until),
newest AS (
  SELECT * FROM v_decisions WHERE at >= (SELECT since FROM bounds) AND at < (SELECT until FROM bounds)
  ORDER BY id DESC LIMIT (SELECT most FROM bounds)
)
SELECT id, CAST(at AS bigint) AS at_unix_s, policy, action, subject, code, reason, inputs, cluster
FROM newest
ORDER BY id;
