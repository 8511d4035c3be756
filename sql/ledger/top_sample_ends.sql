-- The first ends and reopenings of one sample, in order.
SELECT at, state, reason, step, attempt, reward, advantage FROM v_sample_ends WHERE sample_id = :sample_id ORDER BY id LIMIT :most;
