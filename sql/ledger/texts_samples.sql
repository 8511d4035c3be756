-- Some samples with what became of their contents.
SELECT s.sample_id, s.group_id, s.contents, s.accepted_len, r.purged_at
FROM samples s JOIN runs r ON r.run_id = s.run_id WHERE s.sample_id IN :sample_ids ORDER BY s.sample_id;
