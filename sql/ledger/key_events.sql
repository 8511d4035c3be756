-- Which keys came into force and went out of it, in order?
SELECT kind, subject, detail FROM events WHERE kind IN ('key_added', 'key_revoked') ORDER BY id;
