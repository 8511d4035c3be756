-- Harvested engines of open job intents whose allocation is open, or is not recorded yet. Each of them shows that its job had GPUs.
-- An engine's incarnation is the restart count of its job when it started. An ended allocation of that count, or of a later one, shows
-- that the engine's own allocation is over.
SELECT w.intent_id, w.incarnation, max(w.node) AS node, min(w.joined_at) AS joined_at, max(COALESCE(w.left_at, w.joined_at)) AS seen_at
FROM jobs j
JOIN workers w ON w.intent_id = j.intent_id
WHERE j.ended_at IS NULL
  AND NOT EXISTS (SELECT 1 FROM gpu_allocations h WHERE h.intent_id = w.intent_id AND h.restart_count >= w.incarnation AND h.ended_at IS NOT NULL)
GROUP BY w.intent_id, w.incarnation
ORDER BY w.intent_id, w.incarnation;
