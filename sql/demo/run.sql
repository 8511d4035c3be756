-- What became of the demo's run: its state and, when it failed or was stopped, why.
SELECT state, reason FROM runs ORDER BY run_id DESC LIMIT 1
