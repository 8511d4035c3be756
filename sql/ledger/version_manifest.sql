-- The manifest of one weight version: of a base, which adapters among the newest are merged with.
SELECT manifest
FROM weight_versions
WHERE run_id = :run_id AND version = :version;
