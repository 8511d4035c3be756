-- Job intents that have not ended, and whether each holds GPUs as far as we know.
SELECT j.*, EXISTS (SELECT 1 FROM holds h WHERE h.intent_id = j.intent_id AND h.ended_at IS NULL) AS hold_open
FROM jobs j
WHERE j.ended_at IS NULL
ORDER BY j.intended_at, j.intent_id;
