-- The newest decisions without their inputs, and the node of the job that each is about (of a further cluster: CLUSTER/NODE).
SELECT d.id, d.at, d.policy, d.action, d.subject, d.code, d.reason, COALESCE(CASE WHEN d.cluster = '' OR j.node = '' THEN j.node ELSE d.cluster || '/' || j.node END, '') AS node, d.cluster
FROM (SELECT * FROM v_decisions ORDER BY id DESC LIMIT :most) d
LEFT JOIN v_jobs j ON j.intent_id = d.subject
ORDER BY d.id DESC;
