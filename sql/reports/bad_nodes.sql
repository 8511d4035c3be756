-- On which nodes did engines fail, how often, why, with which exit codes, and until when does each get no engine?
-- Failures that are Slurm's doing (a preemption, a time limit, a lost node) are not here: report preemptions. Exit codes and reasons are of the
-- last three failures, the newest first; an exit code is the shell's view, 128 + signal. "quarantined_until" is empty where engines may start.
-- Two clusters may have nodes of one name: "cluster" is empty for the daemon's own.
WITH numbered AS (
    SELECT cluster, node, reason, at, COALESCE(CAST(exit_code AS text), 'unknown') AS code,
           row_number() OVER (PARTITION BY cluster, node ORDER BY at DESC, id DESC) AS nth
    FROM v_engine_deaths
),
failed AS (
    SELECT cluster, node, count(*) AS failures, max(at) AS last_at,
           max(CASE WHEN nth = 1 THEN code END) || COALESCE(', ' || max(CASE WHEN nth = 2 THEN code END), '')
           || COALESCE(', ' || max(CASE WHEN nth = 3 THEN code END), '') AS codes,
           max(CASE WHEN nth = 1 THEN reason END) || COALESCE(' | ' || max(CASE WHEN nth = 2 THEN reason END), '')
           || COALESCE(' | ' || max(CASE WHEN nth = 3 THEN reason END), '') AS reasons
    FROM numbered
    GROUP BY cluster, node
),
runs AS (SELECT cluster, node, count(DISTINCT NULLIF(run_id, 0)) AS runs FROM v_engine_deaths GROUP BY cluster, node),
held AS (
    SELECT cluster, node, count(*) AS quarantines, max(CASE WHEN released_at IS NULL THEN until_at END) AS until_at
    FROM v_node_quarantines
    GROUP BY cluster, node
),
named AS (SELECT cluster, node FROM failed UNION SELECT cluster, node FROM held),
-- An allocation of several nodes names them all, joined by ','.
placed AS (SELECT COALESCE(j.cluster, '') AS cluster, a.node FROM v_gpu_allocations a LEFT JOIN v_jobs j ON j.intent_id = a.intent_id),
jobs AS (
    SELECT m.cluster, m.node, count(*) AS allocations
    FROM named m
    JOIN placed a ON a.cluster = m.cluster AND (a.node = m.node OR ',' || a.node || ',' LIKE '%,' || m.node || ',%')
    GROUP BY m.cluster, m.node
)
SELECT m.node, COALESCE(f.failures, 0) AS failures, COALESCE(j.allocations, 0) AS allocations, COALESCE(u.runs, 0) AS runs_that_failed,
       COALESCE(h.quarantines, 0) AS quarantines, CAST(CASE WHEN h.until_at > n.unix_s THEN h.until_at END AS bigint) AS quarantined_until_unix_s,
       CAST(f.last_at AS bigint) AS last_failure_unix_s, COALESCE(f.codes, '') AS last_exit_codes, COALESCE(f.reasons, '') AS last_reasons,
       m.cluster
FROM named m
CROSS JOIN v_now n
LEFT JOIN failed f ON f.cluster = m.cluster AND f.node = m.node
LEFT JOIN jobs j ON j.cluster = m.cluster AND j.node = m.node
LEFT JOIN runs u ON u.cluster = m.cluster AND u.node = m.node
LEFT JOIN held h ON h.cluster = m.cluster AND h.node = m.node
ORDER BY failures DESC, m.cluster, m.node;
