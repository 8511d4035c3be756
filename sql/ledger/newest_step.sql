-- The newest step (or evaluation) of a run that survives; of a run that has committed none, the newest that was submitted.
SELECT COALESCE(
    (SELECT MAX(step) FROM steps WHERE run_id = :run_id AND purpose = :purpose AND rewound_by IS NULL),
    (SELECT MAX(step) FROM groups WHERE run_id = :run_id AND purpose = :purpose)) AS step;
