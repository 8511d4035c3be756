-- Steps and evaluations that survived, with their metrics (JSON).
SELECT purpose, step, metrics, committed_at FROM steps WHERE rewound_by IS NULL ORDER BY committed_at
