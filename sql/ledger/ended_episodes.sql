-- Names of a run's episodes that have ended, the newest last: a run that is opened again begins none of these.
SELECT name FROM (
    SELECT episode_id, name FROM episodes WHERE run_id = :run_id AND state <> 'open' ORDER BY episode_id DESC LIMIT :most
) newest
ORDER BY episode_id;
