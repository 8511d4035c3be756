-- How often each prompt of a run's steps was submitted: the next group's `retry`.
SELECT purpose, step, prompt_index, MAX(retry) + 1 FROM groups WHERE run_id = :run_id GROUP BY purpose, step, prompt_index;
