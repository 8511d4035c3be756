-- How many GPU-hours were harvested, by day (UTC), node and user? (An allocation across midnight counts on both days; an open one up to now.)
-- "Now" is the ledger's last commit. The user is the name under which the run's owner was enrolled, or the owner's public key.
WITH spans AS (
    SELECT h.node, h.gpus, COALESCE(r.owner, '') AS owner, h.started_at, COALESCE(h.ended_at, n.unix_s, h.started_at) AS ended_at
    FROM v_allocation_runs h
    CROSS JOIN v_now n
    LEFT JOIN v_runs r ON r.run_id = h.run_id
),
days AS MATERIALIZED (
    SELECT * FROM v_days
    WHERE to_unix_s > (SELECT min(started_at) FROM spans) AND from_unix_s < (SELECT max(ended_at) FROM spans)
)
SELECT d.day_utc, s.node, s.owner, count(*) AS allocations,
       round(CAST(sum(s.gpus * (CASE WHEN s.ended_at < d.to_unix_s THEN s.ended_at ELSE d.to_unix_s END
                                - CASE WHEN s.started_at > d.from_unix_s THEN s.started_at ELSE d.from_unix_s END)) / 3600 AS numeric), 4)
           AS gpu_hours
FROM days d
JOIN spans s ON s.started_at < d.to_unix_s AND s.ended_at > d.from_unix_s AND s.ended_at > s.started_at
GROUP BY d.day_utc, s.node, s.owner
ORDER BY d.day_utc, s.node, s.owner;
