-- What is happening at this moment: samples and tokens in flight, engines, preemptions so far, tokens salvaged so far.
SELECT
    (SELECT count(*) FROM samples WHERE state = 'open') AS samples_open,
    (SELECT count(*) FROM leases WHERE ended_at IS NULL) AS samples_in_flight,
    (SELECT coalesce(sum(accepted_len), 0) FROM samples WHERE state = 'open') AS tokens_in_flight,
    (SELECT count(*) FROM workers WHERE left_at IS NULL AND kind = 'harvested') AS engines_harvested,
    (SELECT count(*) FROM workers WHERE left_at IS NULL AND kind = 'reserved') AS engines_reserved,
    (SELECT count(*) FROM gpu_allocations WHERE reason IN ('preempted', 'requeued', 'node_fail')) AS preemptions,
    (SELECT coalesce(sum(salvaged), 0) FROM workers WHERE left_at IS NOT NULL AND kind = 'harvested') AS tokens_salvaged,
    (SELECT coalesce(sum(regenerated), 0) FROM workers WHERE left_at IS NOT NULL) AS tokens_regenerated,
    (SELECT coalesce(sum(n_tokens), 0) FROM chunks) AS tokens_total
