-- Every weight version that runs which have not ended published.
SELECT v.*
FROM weight_versions v
JOIN runs r ON r.run_id = v.run_id
WHERE r.state = 'active'
ORDER BY v.run_id, v.version;
