-- What the writer does with each kind of record: its statements over one parameter row, the same on SQLite and PostgreSQL.
-- Generated from `KINDS` (scavenger/ledger/write/statements.py), for readers only:
--     python -m scavenger.ledger.write.sql_page > sql/ledger/writes.sql
-- A parameter :p_x is the record's field x. Many records of a kind are written by one statement over all their rows (batch_sql.py).

-- RunCreated
INSERT INTO runs (run_id, name, owner_key, seed, config, engine, tokenizer, created_at, state, reason, attempt,
    resume_step, last_step, last_version)
VALUES (:p_run_id, :p_name, :p_owner_key, :p_seed, :p_config, :p_engine, :p_tokenizer, :p_at, 'active', '', 0, 0, 0, 0);

-- AttemptGranted
INSERT INTO attempts (run_id, attempt, host, job_id, resume_step, config, engine, started_at)
VALUES (:p_run_id, :p_attempt, :p_host, :p_job_id, :p_resume_step, :p_config, :p_engine, :p_at);
UPDATE runs
SET state='active', reason='', ended_at=NULL, attempt=:p_attempt, resume_step=:p_resume_step
WHERE runs.run_id = :p_run_id;

-- RunEnded
UPDATE runs
SET state=:p_state, reason=:p_reason, ended_at=:p_at
WHERE runs.run_id = :p_run_id;

-- VersionPublished
INSERT INTO weight_versions (run_id, version, step, attempt, root, manifest, nbytes, published_at)
VALUES (:p_run_id, :p_version, :p_step, :p_attempt, :p_root, :p_manifest, :p_nbytes, :p_at);
UPDATE runs
SET last_version=CASE WHEN (runs.last_version < :p_version) THEN :p_version ELSE runs.last_version END
WHERE runs.run_id = :p_run_id;

-- StepCommitted
INSERT INTO steps (run_id, purpose, step, attempt, version, metrics, committed_at)
VALUES (:p_run_id, :p_purpose, :p_step, :p_attempt, :p_version, :p_metrics, :p_at);
UPDATE runs
SET last_step=CASE WHEN (:p_purpose = 'train') THEN CASE WHEN (runs.last_step < :p_step) THEN :p_step ELSE
    runs.last_step END ELSE runs.last_step END
WHERE runs.run_id = :p_run_id;

-- StepsRewound
UPDATE steps
SET rewound_by=:p_attempt
WHERE steps.run_id = :p_run_id AND steps.step > :p_to_step AND steps.rewound_by IS NULL;
UPDATE checkpoints
SET rewound_by=:p_attempt
WHERE checkpoints.run_id = :p_run_id AND checkpoints.step > :p_to_step AND checkpoints.rewound_by IS NULL;
UPDATE runs
SET last_step=:p_to_step
WHERE runs.run_id = :p_run_id;

-- CheckpointRecorded
INSERT INTO checkpoints (run_id, step, version, root, path, recorded_at, kept)
VALUES (:p_run_id, :p_step, :p_version, :p_root, :p_path, :p_at, :p_kept);

-- GroupCreated
-- The second statement runs once for each of the group's n samples.
INSERT INTO groups (group_id, run_id, purpose, step, prompt_index, retry, created_version, version, prompt, n,
    first_sample_id, sampling, meta, created_at, delivered_attempt)
VALUES (:p_group_id, :p_run_id, :p_purpose, :p_step, :p_prompt_index, :p_retry, :p_version, :p_version, :p_prompt, :p_n,
    :p_first_sample_id, :p_sampling, :p_meta, :p_at, 0);
INSERT INTO samples (sample_id, group_id, run_id, sample_index, state, reason, finish, accepted_len, epoch, moves,
    worker_id, regenerated, ended_step, ended_attempt, reward_version)
VALUES (:p_sample_id, :p_group_id, :p_run_id, :p_index, 'open', '', '', 0, 0, 0, 0, 0, 0, 0, '');

-- GroupAdopted
UPDATE groups
SET version=:p_version
WHERE groups.group_id = :p_group_id;

-- GroupDeferred
UPDATE groups
SET step=:p_step
WHERE groups.group_id = :p_group_id;

-- GroupDelivered
UPDATE groups
SET delivered_attempt=:p_attempt, delivered_at=:p_at
WHERE groups.group_id = :p_group_id;

-- LeaseGranted
INSERT INTO leases (sample_id, epoch, worker_id, version, start_len, end_len, regenerated, reason, granted_at)
VALUES (:p_sample_id, :p_epoch, :p_worker_id, :p_version, :p_offset, :p_offset, 0, '', :p_at);
UPDATE samples
SET epoch=:p_epoch, moves=(samples.moves + CASE WHEN (:p_offset > 0) THEN 1 ELSE 0 END), worker_id=:p_worker_id
WHERE samples.sample_id = :p_sample_id;

-- LeaseEnded
UPDATE leases
SET end_len=:p_length, regenerated=:p_regenerated, reason=:p_reason, ended_at=:p_at
WHERE leases.sample_id = :p_sample_id AND leases.epoch = :p_epoch;
UPDATE samples
SET accepted_len=CASE WHEN (samples.accepted_len < :p_length) THEN :p_length ELSE samples.accepted_len END,
    regenerated=(samples.regenerated + :p_regenerated)
WHERE samples.sample_id = :p_sample_id;

-- LeaseMoved
INSERT INTO leases (sample_id, epoch, worker_id, version, start_len, end_len, regenerated, reason, granted_at)
VALUES (:p_sample_id, (:p_epoch + 1), :p_worker_id, :p_version, :p_length, :p_length, 0, '', :p_at);
UPDATE leases
SET end_len=:p_length, regenerated=:p_regenerated, reason=:p_reason, ended_at=:p_at
WHERE leases.sample_id = :p_sample_id AND leases.epoch = :p_epoch;
UPDATE samples
SET accepted_len=CASE WHEN (samples.accepted_len < :p_length) THEN :p_length ELSE samples.accepted_len END,
    epoch=(:p_epoch + 1), moves=(samples.moves + CASE WHEN (:p_length > 0) THEN 1 ELSE 0 END), worker_id=:p_worker_id,
    regenerated=(samples.regenerated + :p_regenerated)
WHERE samples.sample_id = :p_sample_id;

-- ChunkAccepted
-- One row for each sample, with its longest length. The chunks themselves: batches.append_chunks.
UPDATE samples
SET accepted_len=CASE WHEN (samples.accepted_len < :p_length) THEN :p_length ELSE samples.accepted_len END
WHERE samples.sample_id = :p_sample_id;

-- ContentsReduced
-- What is run depends on what the chunks hold: compaction.reduce_contents.

-- SampleFinished
UPDATE samples
SET state='complete', finish=:p_finish, accepted_len=CASE WHEN (samples.accepted_len < :p_length) THEN :p_length ELSE
    samples.accepted_len END, finished_at=:p_at
WHERE samples.sample_id = :p_sample_id;

-- SampleEnded
INSERT INTO sample_ends (sample_id, state, reason, step, attempt, reward, advantage, at, reward_version)
VALUES (:p_sample_id, :p_state, :p_reason, :p_step, :p_attempt, :p_reward, :p_advantage, :p_at, :p_reward_version);
UPDATE samples
SET state=:p_state, reason=:p_reason, reward=:p_reward, advantage=:p_advantage, ended_step=:p_step,
    ended_attempt=:p_attempt, ended_at=:p_at, reward_version=:p_reward_version
WHERE samples.sample_id = :p_sample_id;

-- DifferencesRecorded
INSERT INTO token_differences (sample_id, step, attempt, n_tokens, mean, differences)
VALUES (:p_sample_id, :p_step, :p_attempt, :p_n_tokens, :p_mean, :p_differences);

-- SampleReopened
INSERT INTO sample_ends (sample_id, state, reason, step, attempt, reward, advantage, at, reward_version)
VALUES (:p_sample_id, 'reopened', '', 0, :p_attempt, NULL, NULL, :p_at, '');
UPDATE samples
SET state='complete', reason='', advantage=NULL, ended_step=0, ended_attempt=0, ended_at=NULL
WHERE samples.sample_id = :p_sample_id;

-- EpisodeBegun
INSERT INTO episodes (episode_id, run_id, name, state, reason, begun_at, worker, spent_turns, spent_tokens)
VALUES (:p_episode_id, :p_run_id, :p_name, 'open', '', :p_at, '', 0, 0);

-- EpisodeEnded
UPDATE episodes
SET state=:p_state, reason=:p_reason, ended_at=:p_at, worker=:p_worker
WHERE episodes.episode_id = :p_episode_id;

-- EpisodeSpent
UPDATE episodes
SET spent_turns=:p_turns, spent_tokens=:p_tokens
WHERE episodes.episode_id = :p_episode_id;

-- TurnBegun
INSERT INTO turns (group_id, episode_id, run_id, number, request, content, begun_at, parent_id, prefix_len,
    prompt_tokens, prompt_sha256)
VALUES (:p_group_id, :p_episode_id, :p_run_id, :p_number, :p_request, :p_content, :p_at, :p_parent_id, :p_prefix_len,
    :p_prompt_tokens, :p_prompt_sha256);

-- TurnRewarded
UPDATE turns
SET reward=:p_reward
WHERE turns.group_id = :p_group_id;

-- TurnSampleFinished
INSERT INTO turn_samples (sample_id, sha256)
VALUES (:p_sample_id, :p_sha256);

-- Delivered
INSERT INTO deliveries (delivery_id, run_id, source_run_id, episode_id, group_delivery_id, step, prompt_index,
    episode_index, reward, version, episode_rows, state, reason, ended_step, ended_attempt, advantage, delivered_at)
VALUES (:p_delivery_id, :p_run_id, :p_source_run_id, :p_episode_id, :p_group, :p_step, :p_prompt_index,
    :p_episode_index, :p_reward, :p_version, :p_rows, :p_state, :p_reason, 0, 0, NULL, :p_at);

-- TurnDelivered
INSERT INTO delivered_turns (group_id, run_id, delivery_id, advantage)
VALUES (:p_group_id, :p_run_id, :p_delivery_id, NULL);

-- DeliveredTurnTaken
UPDATE delivered_turns
SET advantage=:p_advantage
WHERE delivered_turns.group_id = :p_group_id;

-- DeliveryTaken
UPDATE deliveries
SET state=:p_outcome, reason=:p_reason, ended_step=:p_step, ended_attempt=:p_attempt, advantage=:p_advantage,
    ended_at=:p_at
WHERE deliveries.delivery_id = :p_delivery_id;

-- DeliveryReopened
UPDATE deliveries
SET state='due', reason='', ended_step=0, ended_attempt=0, advantage=NULL, ended_at=NULL
WHERE deliveries.delivery_id = :p_delivery_id;

-- DeliveryEnded
UPDATE deliveries
SET state=:p_state, reason=:p_reason, ended_at=:p_at
WHERE deliveries.delivery_id = :p_delivery_id;

-- ToolAsked
INSERT INTO tool_calls (call_id, episode_id, run_id, call, tool, asker, answer, asked_at)
VALUES (:p_call_id, :p_episode_id, :p_run_id, :p_call, :p_tool, :p_asker, NULL, :p_at);

-- ToolAnswered
UPDATE tool_calls
SET answer=:p_answer, answered_at=:p_at
WHERE tool_calls.call_id = :p_call_id;

-- WorkerJoined
INSERT INTO workers (worker_id, run_id, kind, intent_id, session, incarnation, job_id, node, gpus, engine, slot,
    joined_at, reason, samples, salvaged, regenerated, cluster)
VALUES (:p_worker_id, :p_run_id, :p_kind, :p_intent_id, :p_session, :p_incarnation, :p_job_id, :p_node, :p_gpus,
    :p_engine, :p_slot, :p_at, '', 0, 0, 0, :p_cluster);

-- WorkerLeft
UPDATE workers
SET left_at=:p_at, reason=:p_reason, notice=:p_notice, samples=:p_samples, salvaged=:p_salvaged,
    regenerated=:p_regenerated
WHERE workers.worker_id = :p_worker_id;

-- JobIntended
INSERT INTO jobs (intent_id, run_id, partition, gpus, worker_key, intended_at, job_id, last_state, flags, reason, node,
    restart_count, pinned, nodes, cluster, kind)
VALUES (:p_intent_id, :p_run_id, :p_partition, :p_gpus, :p_worker_key, :p_at, 0, '', '', '', '', 0, :p_pinned, :p_nodes,
    :p_cluster, :p_kind);

-- JobChangedHands
INSERT INTO job_runs (intent_id, run_id, since_at, until_at)
VALUES (:p_intent_id, :p_run_before, :p_since, :p_at);
UPDATE jobs
SET run_id=:p_run_id, worker_key=:p_worker_key
WHERE jobs.intent_id = :p_intent_id;

-- JobSubmitted
UPDATE jobs
SET job_id=:p_job_id, submitted_at=:p_at
WHERE jobs.intent_id = :p_intent_id;

-- JobObserved
INSERT INTO job_states (intent_id, job_id, state, flags, reason, node, restart_count, at)
VALUES (:p_intent_id, :p_job_id, :p_state, :p_flags, :p_reason, :p_node, :p_restart_count, :p_at);
UPDATE jobs
SET job_id=:p_job_id, last_state=:p_state, flags=:p_flags, reason=:p_reason, node=:p_node,
    restart_count=:p_restart_count, observed_at=:p_at
WHERE jobs.intent_id = :p_intent_id;

-- JobEnded
UPDATE jobs
SET last_state=:p_state, reason=:p_reason, ended_at=:p_at
WHERE jobs.intent_id = :p_intent_id;

-- AllocationStarted
INSERT INTO gpu_allocations (intent_id, restart_count, job_id, node, gpus, started_at, reason)
VALUES (:p_intent_id, :p_restart_count, :p_job_id, :p_node, :p_gpus, :p_at, '');

-- AllocationEnded
UPDATE gpu_allocations
SET ended_at=:p_at, reason=:p_reason
WHERE gpu_allocations.intent_id = :p_intent_id AND gpu_allocations.restart_count = :p_restart_count;

-- AllocationCorrected
UPDATE gpu_allocations
SET node=:p_node, gpus=:p_gpus, started_at=:p_started_at, ended_at=:p_ended_at, reason=:p_reason
WHERE gpu_allocations.intent_id = :p_intent_id AND gpu_allocations.restart_count = :p_restart_count;

-- ClusterPolled
INSERT INTO cluster_polls (gpus_idle, gpus_harvested, gpus_other_users, gpus_reserved, gpus_unusable,
    jobs_pending_other_users, at, cluster)
VALUES (:p_gpus_idle, :p_gpus_harvested, :p_gpus_other_users, :p_gpus_reserved, :p_gpus_unusable,
    :p_jobs_pending_other_users, :p_at, :p_cluster);

-- OtherUserWaits
INSERT INTO other_users_waits (job_id, user_name, partition, gpus, submitted_at, eligible_at, seen_at, outcome,
    harvested_gpus, harvested_gpu_s, cluster)
VALUES (:p_job_id, :p_user_name, :p_partition, :p_gpus, :p_submitted_at, :p_eligible_at, :p_at, '', :p_harvested_gpus,
    0.0, :p_cluster);

-- OtherUserWaited
UPDATE other_users_waits
SET started_at=:p_started_at, ended_at=:p_at, outcome=:p_outcome, harvested_gpus=:p_harvested_gpus,
    harvested_gpu_s=:p_harvested_gpu_s
WHERE other_users_waits.job_id = :p_job_id AND other_users_waits.submitted_at = :p_submitted_at AND
    other_users_waits.cluster = :p_cluster AND other_users_waits.ended_at IS NULL;

-- TrainingJobStarted
INSERT INTO training_jobs (run_id, job_id, user_name, account, nodes, gpus, started_at)
VALUES (:p_run_id, :p_job_id, :p_user_name, :p_account, :p_nodes, :p_gpus, :p_at);

-- TrainingJobEnded
UPDATE training_jobs
SET ended_at=:p_at
WHERE training_jobs.run_id = :p_run_id AND training_jobs.job_id = :p_job_id AND training_jobs.ended_at IS NULL;

-- EngineDied
INSERT INTO engine_deaths (node, run_id, intent_id, job_id, restart_count, exit_code, reason, lived_s, at, cluster)
VALUES (:p_node, :p_run_id, :p_intent_id, :p_job_id, :p_restart_count, :p_exit_code, :p_reason, :p_lived_s, :p_at,
    :p_cluster);

-- NodeQuarantined
INSERT INTO node_quarantines (node, reason, at, until_at, cluster)
VALUES (:p_node, :p_reason, :p_at, :p_until_at, :p_cluster);

-- NodeReleased
UPDATE node_quarantines
SET released_at=:p_at
WHERE node_quarantines.node = :p_node AND node_quarantines.cluster = :p_cluster AND node_quarantines.released_at IS NULL;

-- Decision
INSERT INTO decisions (policy, action, subject, reason, inputs, at, code, cluster)
VALUES (:p_policy, :p_action, :p_subject, :p_reason, :p_inputs, :p_at, :p_code, :p_cluster);

-- Event
INSERT INTO events (kind, run_id, subject, reason, detail, at)
VALUES (:p_kind, :p_run_id, :p_subject, :p_reason, :p_detail, :p_at);

-- Heartbeat
-- Nothing: the transaction itself moves committed_at (advance_batch.sql).
