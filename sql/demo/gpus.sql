-- GPUs by owner at each observation.
SELECT at, idle, harvested, others, reserved, unusable FROM cluster_samples ORDER BY at
