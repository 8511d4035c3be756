-- On which nodes did engines fail, how often, why, with which exit codes, and until when does each get no engine?
-- Failures that are Slurm's doing (a preemption, a time limit, a lost node) are not here: report preemptions. Exit codes and reasons are of the
-- last three failures, the newest first; an exit code is the shell's view, 128 + signal. "quarantined_until" is empty where engines may start.
WITH numbered AS (
    SELECT node, reason, at, COALESCE(CAST(exit_code AS text), 'unknown') AS code, row_number() OVER (PARTITION BY node ORDER BY at DESC, id DESC) AS nth
    FROM v_engine_deaths
),
failed AS (
    SELECT node, count(*) AS failures, max(at) AS last_at,
           max(CASE WHEN nth = 1 THEN code END) || COALESCE(', ' || max(CASE WHEN nth = 2 THEN code END), '')
           || COALESCE(', ' || max(CASE WHEN nth = 3 THEN code END), '') AS codes,
           max(CASE WHEN nth = 1 THEN reason END) || COALESCE(' | ' || max(CASE WHEN nth = 2 THEN reason END), '')
           || COALESCE(' | ' || max(CASE WHEN nth = 3 THEN reason END), '') AS reasons
    FROM numbered
    GROUP BY node
),
runs AS (SELECT node, count(DISTINCT NULLIF(run_id, 0)) AS runs FROM v_engine_deaths GROUP BY node),
held AS (SELECT node, count(*) AS quarantines, max(CASE WHEN released_at IS NULL THEN until_at END) AS until_at FROM v_node_quarantines GROUP BY node),
named AS (SELECT node FROM failed UNION SELECT node FROM held),
-- An allocation of several nodes names them all, joined by ','.
jobs AS (SELECT m.node, count(*) AS allocations FROM named m JOIN v_gpu_allocations a
         ON a.node = m.node OR ',' || a.node || ',' LIKE '%,' || m.node || ',%' GROUP BY m.node)
SELECT m.node, COALESCE(f.failures, 0) AS failures, COALESCE(j.allocations, 0) AS allocations, COALESCE(u.runs, 0) AS runs_that_failed,
       COALESCE(h.quarantines, 0) AS quarantines, CAST(CASE WHEN h.until_at > n.unix_s THEN h.until_at END AS bigint) AS quarantined_until_unix_s,
       CAST(f.last_at AS bigint) AS last_failure_unix_s, COALESCE(f.codes, '') AS last_exit_codes, COALESCE(f.reasons, '') AS last_reasons
FROM named m
CROSS JOIN v_now n
LEFT JOIN failed f ON f.node = m.node
LEFT JOIN jobs j ON j.node = m.node
LEFT JOIN runs u ON u.node = m.node
LEFT JOIN held h ON h.node = m.node
ORDER BY failures DESC, m.node;
