-- How many GPU-hours were harvested, by day (UTC) and node? (A hold across midnight counts on both days; an open one up to now.)
-- "Now" is the ledger's last commit. Days are counted in whole numbers since 1970-01-01, because the two databases share no date
-- function; "civil" turns them into dates (H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days).
WITH RECURSIVE spans AS (
    SELECT node, gpus, started_at, COALESCE(ended_at, (SELECT max(committed_at) FROM generations), started_at) AS ended_at
    FROM holds
),
days (day) AS (
    SELECT min(CAST(started_at AS bigint)) / 86400 - 1 FROM spans
    UNION ALL
    SELECT day + 1 FROM days WHERE (day + 1) * 86400 <= (SELECT max(ended_at) FROM spans)
),
cuts AS (
    SELECT d.day, s.node, s.gpus,
           CASE WHEN s.ended_at < (d.day + 1) * 86400 THEN s.ended_at ELSE (d.day + 1) * 86400 END
           - CASE WHEN s.started_at > d.day * 86400 THEN s.started_at ELSE d.day * 86400 END AS held_s
    FROM days d
    JOIN spans s ON s.started_at < (d.day + 1) * 86400 AND s.ended_at > d.day * 86400
),
eras AS (SELECT day, node, gpus, held_s, (day + 719468) / 146097 AS era, (day + 719468) % 146097 AS doe FROM cuts),
years AS (SELECT eras.*, (doe - doe / 1460 + doe / 36524 - doe / 146096) / 365 AS yoe FROM eras),
months AS (SELECT years.*, doe - (365 * yoe + yoe / 4 - yoe / 100) AS doy FROM years),
civil AS (SELECT months.*, (5 * doy + 2) / 153 AS mp FROM months),
dates AS (
    SELECT node, gpus, held_s, doy - (153 * mp + 2) / 5 + 1 AS d, CASE WHEN mp < 10 THEN mp + 3 ELSE mp - 9 END AS m,
           yoe + era * 400 + CASE WHEN mp < 10 THEN 0 ELSE 1 END AS y
    FROM civil
)
SELECT CAST(y AS text) || CASE WHEN m < 10 THEN '-0' ELSE '-' END || CAST(m AS text)
       || CASE WHEN d < 10 THEN '-0' ELSE '-' END || CAST(d AS text) AS day,
       node, count(*) AS holds, round(CAST(sum(gpus * held_s) / 3600 AS numeric), 4) AS gpu_hours
FROM dates
GROUP BY y, m, d, node
ORDER BY y, m, d, node;
