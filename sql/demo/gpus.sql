-- GPUs by owner at each poll.
SELECT at, gpus_idle, gpus_harvested, gpus_other_users, gpus_reserved, gpus_unusable FROM cluster_polls WHERE cluster = '' ORDER BY at
