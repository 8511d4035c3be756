-- Engines that died on a node of a cluster, and its quarantines; the newest first.
SELECT at, 'engine died' AS kind, reason, CAST(NULL AS double precision) AS until_at FROM v_engine_deaths WHERE node = :node AND cluster = :cluster
UNION ALL
SELECT at, 'quarantined' AS kind, reason, COALESCE(released_at, until_at) AS until_at FROM v_node_quarantines WHERE node = :node AND cluster = :cluster
ORDER BY at DESC
LIMIT :most;
