-- The manifest of one weight version. Asked for the base that adapters among the newest versions are merged with.
SELECT manifest
FROM weight_versions
WHERE run_id = :run_id AND version = :version;
