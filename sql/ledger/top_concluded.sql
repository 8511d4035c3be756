-- The newest decision of the harvester on the daemon's own cluster; none where it is not among the newest of all.
SELECT d.at, d.reason, substr(d.inputs, 1, 262144) AS inputs
FROM (SELECT * FROM v_decisions ORDER BY id DESC LIMIT 5000) d
WHERE d.policy = 'harvest' AND d.cluster = ''
ORDER BY d.id DESC
LIMIT 1;
