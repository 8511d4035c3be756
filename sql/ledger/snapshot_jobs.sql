-- Job intents that have not ended, and whether each holds GPUs as far as we know.
SELECT j.*, EXISTS (SELECT 1 FROM holds h WHERE h.intent_id = j.intent_id AND h.ended_at IS NULL) AS hold_open,
       COALESCE((SELECT max(h.started_at) FROM holds h WHERE h.intent_id = j.intent_id AND h.ended_at IS NULL), 0.0) AS held_since
FROM jobs j
WHERE j.ended_at IS NULL
ORDER BY j.intended_at, j.intent_id;
