-- The newest run of that name, ended or not.
SELECT * FROM runs WHERE name = :name ORDER BY run_id DESC LIMIT 1;
