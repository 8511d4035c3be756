-- A run's first step after `done` and up to `bound` for which anything was generated.
SELECT min(step) AS step FROM (
    SELECT min(step) AS step FROM groups WHERE run_id = :run_id AND purpose = 'train' AND step > :done AND step <= :bound
    UNION ALL
    SELECT min(step) FROM groups WHERE run_id = :run_id AND purpose = 'eval' AND step > :done AND step <= :bound
) each_purpose;
