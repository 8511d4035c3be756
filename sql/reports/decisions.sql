-- What was decided by which policy for which cluster, how often, and why last? (Each one: decisions_with_reasons)
SELECT d.policy, d.action, d.code, n.decisions, CAST(n.first_at AS bigint) AS first_unix_s, CAST(d.at AS bigint) AS last_unix_s,
       d.subject AS last_subject, d.reason AS last_reason, d.cluster
FROM (
    SELECT policy, action, code, cluster, count(*) AS decisions, min(at) AS first_at, max(id) AS last_id
    FROM v_decisions
    GROUP BY policy, action, code, cluster
) n
JOIN v_decisions d ON d.id = n.last_id
ORDER BY d.policy, d.action, d.code, d.cluster;
