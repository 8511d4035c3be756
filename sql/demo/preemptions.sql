-- What each lost engine had in flight: samples, tokens salvaged, tokens generated again, and whether it had notice.
SELECT left_at, node, job_id, notice, reason, samples, salvaged, regenerated
FROM workers WHERE left_at IS NOT NULL AND kind = 'harvested' ORDER BY left_at
