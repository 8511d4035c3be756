-- Every weight version of every run. The manifest comes only with the newest few, which engines may still ask for. Adapters among them name
-- a base, whose manifest version_manifest reads. The root hash is what a replay compares, and a long run has many versions.
SELECT v.run_id, v.version, v.step, v.attempt, v.root, v.nbytes, v.published_at,
       CASE WHEN v.version > r.last_version - 4 AND r.state = 'active' THEN v.manifest END AS manifest
FROM weight_versions v
JOIN runs r ON r.run_id = v.run_id
ORDER BY v.run_id, v.version;
