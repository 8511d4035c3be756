-- Workers that joined and are not known to have left.
SELECT * FROM workers WHERE left_at IS NULL ORDER BY worker_id;
