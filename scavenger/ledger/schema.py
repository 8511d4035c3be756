"""The ledger's tables, as SQLAlchemy Core metadata. Pure; one schema for SQLite and PostgreSQL.

Owns names, types and indexes. `migrations/` must add up to exactly this (a test holds it). Conventions:

- Every integer is 64 bits wide, every time is Unix seconds as a double, every payload is a packed
  little-endian array (`protocol.messages.codec`).
- Ids come from the core, except the `id` of append-only tables, which the database counts.
- There are no foreign keys. The writer batches rows by kind, so a parent may follow its child within a transaction, and a run's
  contents may be purged while its accounting stays. `ledger check` proves the references instead.
- Columns marked *derived* repeat what other rows say, so that an admin's query needs one table. Only the writer keeps them.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Boolean, Column, Double, Index, LargeBinary, MetaData, Table, Text

#: SQLite counts ids by itself only in a column whose type is spelled INTEGER; there it is 64 bits wide too.
Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

metadata = MetaData()


def _int(name: str, **options: Any) -> Column[int]:
    return Column(name, Int, nullable=False, **options)


def _key(name: str) -> Column[int]:
    return Column(name, Int, primary_key=True, autoincrement=False)


def _counted() -> Column[int]:
    return Column("id", Int, primary_key=True, autoincrement=True)


def _text(name: str, **options: Any) -> Column[str]:
    return Column(name, Text, nullable=False, **options)


def _time(name: str) -> Column[float]:
    return Column(name, Double, nullable=False)


def _maybe_time(name: str) -> Column[float | None]:
    return Column(name, Double, nullable=True)


def _bytes(name: str) -> Column[bytes]:
    return Column(name, LargeBinary, nullable=False)


#: PostgreSQL keeps half of each page free: a row's next version stays on its page, and no index changes.
_UPDATED: dict[str, Any] = {"postgresql_with": {"fillfactor": 50}}

# ---------------------------------------------------------------- who writes

#: One row for each life of a daemon on this ledger. Every transaction of the writer moves `batch` from n to n + 1 on its own row,
#: which fences (a superseded row is not moved) and tells, after a lost connection, whether the last commit took place.
generations = Table(
    "generations",
    metadata,
    _key("generation"),
    _text("host"),
    _int("pid"),
    _text("code_version"),
    _time("started_at"),
    _time("committed_at"),
    _int("batch"),
    _maybe_time("superseded_at"),
    _text("uid"),  # random: numbers are used again after an older ledger was restored, this is not
    _text("timeline"),  # the ledger's history: the same in all generations, until an older ledger is restored
)

# ---------------------------------------------------------------- runs

runs = Table(
    "runs",
    metadata,
    _key("run_id"),
    _text("name"),
    _text("owner_key"),
    _int("seed"),
    _text("config"),
    _text("engine"),
    _text("tokenizer"),
    _time("created_at"),
    _text("state"),  # active | finished | failed | stopped
    _text("reason"),
    _maybe_time("ended_at"),
    _int("attempt"),  # derived: the newest
    _int("resume_step"),  # derived: of the newest attempt
    _int("last_step"),  # derived: the last surviving train step
    _int("last_version"),  # derived: the highest published, 0 = none
    _maybe_time("purged_at"),  # when `ledger purge` took the contents of what it had generated until then
    Index("ix_runs_name", "name"),
    Index("ix_runs_state", "state"),
)

attempts = Table(
    "attempts",
    metadata,
    _key("run_id"),
    _key("attempt"),
    _text("host"),
    _int("job_id"),
    _int("resume_step"),
    _text("config"),
    _text("engine"),
    _time("started_at"),
)

weight_versions = Table(
    "weight_versions",
    metadata,
    _key("run_id"),
    _key("version"),
    _int("step"),
    _int("attempt"),
    _bytes("root"),
    _bytes("manifest"),
    _int("nbytes"),
    _time("published_at"),
)

#: A step may be committed once by each attempt; the one that survives has no `rewound_by` (the attempt that went back before it).
steps = Table(
    "steps",
    metadata,
    _counted(),
    _int("run_id"),
    _text("purpose"),  # train | eval
    _int("step"),
    _int("attempt"),
    _int("version"),
    _text("metrics"),
    _time("committed_at"),
    Column("rewound_by", Int, nullable=True),
    Index("ix_steps_run", "run_id", "purpose", "step"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _counted(),
    _int("run_id"),
    _int("step"),
    _int("version"),
    _bytes("root"),
    _text("path"),
    _time("recorded_at"),
    Column("rewound_by", Int, nullable=True),
    _text("kept"),  # steps whose checkpoints the trainer kept then, as JSON; "" = it did not say
    Index("ix_checkpoints_run", "run_id", "step"),
)

# ---------------------------------------------------------------- groups and samples

groups = Table(
    "groups",
    metadata,
    _key("group_id"),
    _int("run_id"),
    _text("purpose"),  # train | eval | turn
    _int("step"),  # of a turn: the step that was under way when it was asked for
    _int("prompt_index"),  # of a turn: the group's id
    _int("retry"),
    _int("created_version"),
    _int("version"),  # the one it goes on under, after adoption
    _bytes("prompt"),  # int32; of a turn what it adds to its parent's prompt and completion
    _int("n"),
    _int("first_sample_id"),
    _text("sampling"),
    _text("meta"),
    _time("created_at"),
    _int("delivered_attempt"),  # 0 = never delivered
    _maybe_time("delivered_at"),
    Column("purged_prompt_tokens", Int, nullable=True),  # the prompt's length, once a purge emptied it
    Index("ix_groups_run", "run_id", "purpose", "step"),
)

samples = Table(
    "samples",
    metadata,
    _key("sample_id"),
    _int("group_id"),
    _int("run_id"),
    _int("sample_index"),
    _text(
        "state"
    ),  # open | complete | consumed | filtered | masked | evaluated | served | surplus | superseded | poisoned
    _text("reason"),
    _text("finish"),  # "" | stop | length
    _int("accepted_len"),  # derived, tokens
    _int("epoch"),  # derived: the highest granted
    _int("moves"),  # derived: leases that went on after accepted tokens
    _int("worker_id"),  # derived: of the newest lease, 0 = never leased
    _int("regenerated"),  # derived, tokens generated again over all its leases
    Column("reward", Double, nullable=True),
    Column("advantage", Double, nullable=True),
    _int("ended_step"),
    _int("ended_attempt"),
    _maybe_time("finished_at"),
    _maybe_time("ended_at"),
    # null: its chunks are as they came; else what retention made of them: compacted | dropped | purged
    Column("contents", Text, nullable=True),
    _text("reward_version"),  # of the function that gave the reward; "" = none gave one
    Index("ix_samples_group", "group_id"),
    # Finds the few that are in flight, or that a replay may need, among millions that are final.
    Index("ix_samples_state", "state", "run_id", "ended_step"),
    **_UPDATED,
)

#: Every end and reopening of a sample, in order. `samples` keeps the last one; an audit of I3 needs them all.
sample_ends = Table(
    "sample_ends",
    metadata,
    _counted(),
    _int("sample_id"),
    _text("state"),  # as samples.state, or "reopened"
    _text("reason"),
    _int("step"),
    _int("attempt"),
    Column("reward", Double, nullable=True),
    Column("advantage", Double, nullable=True),
    _time("at"),
    _text("reward_version"),
    Index("ix_sample_ends_sample", "sample_id"),
)

leases = Table(
    "leases",
    metadata,
    _key("sample_id"),
    _key("epoch"),
    _int("worker_id"),
    _int("version"),
    _int("start_len"),  # accepted tokens when it was granted
    _int("end_len"),  # accepted tokens when it ended
    _int("regenerated"),
    _text("reason"),  # "" while it is open
    _time("granted_at"),
    _maybe_time("ended_at"),
    **_UPDATED,
)

#: Moves of many samples at once that are durable here and not in `leases` and `samples` yet (`moves`): empty but for moments.
move_log = Table(
    "move_log",
    metadata,
    _counted(),
    _int("n"),  # how many
    _bytes("moves"),  # msgpack: a list of records.LeaseMoved as arrays of their fields
    _time("at"),
)

#: The hot table: appended to and read; only retention and a purge touch rows, of samples that are final. It has no unique key but the
#: row number, because a unique composite key costs several times the insert itself; that offsets join up is proved by the core, by
#: every snapshot, by compaction and by `ledger check`. Empty payloads: the sample's contents were dropped or purged.
chunks = Table(
    "chunks",
    metadata,
    _counted(),
    _int("sample_id"),
    _int("epoch"),
    _int("start_len"),  # offset of the first token within the completion
    _int("n_tokens"),
    _int("version"),
    _int("worker_id"),
    _time("at"),
    _bytes("tokens"),  # int32
    _bytes("logprobs"),  # float32, under the sampling distribution
    _bytes("raw_logprobs"),  # float32, under the raw model
    #: Experts of each token, as many bytes for each; empty where engines do not report them, null in rows of before revision 0002.
    Column("routing", LargeBinary, nullable=True),
    Index("ix_chunks_sample", "sample_id"),
)

# ---------------------------------------------------------------- episodes

episodes = Table(
    "episodes",
    metadata,
    _key("episode_id"),
    _int("run_id"),
    _text("name"),
    _text("state"),  # open | ended | stopped
    _text("reason"),
    _time("begun_at"),
    _maybe_time("ended_at"),
    Index("ix_episodes_run", "run_id", "state"),
)

#: A turn is a group of `groups`, with its samples, leases and chunks; this is its place in an episode. Its prompt begins with the first
#: `prefix_len` tokens of its parent's prompt and completion, and `groups.prompt` holds the rest alone (`read.prompts` joins them).
turns = Table(
    "turns",
    metadata,
    _key("group_id"),
    _int("episode_id"),
    _int("run_id"),
    _int("number"),  # from 1 within the episode
    _bytes("request"),  # SHA-256 of what names the caller's request
    _bytes("content"),  # SHA-256 of what it asked for
    _time("begun_at"),
    _int("parent_id"),  # a sample of an earlier turn of the episode; 0 = none
    _int("prefix_len"),  # tokens
    _int("prompt_tokens"),  # of the whole prompt
    _bytes("prompt_sha256"),  # of the whole prompt's tokens; empty once they are purged
    Index("ix_turns_episode", "episode_id"),
)

#: A turn's sample that is complete: by this hash a later turn of the episode finds what its prompt begins with.
turn_samples = Table(
    "turn_samples",
    metadata,
    _key("sample_id"),
    _bytes("sha256"),  # of the tokens of its prompt and completion
)

# ---------------------------------------------------------------- workers, jobs, cluster

workers = Table(
    "workers",
    metadata,
    _key("worker_id"),
    _int("run_id"),
    _text("kind"),  # harvested | reserved
    _text("intent_id"),
    _text("session"),
    _int("incarnation"),
    _int("job_id"),
    _text("node"),
    _int("gpus"),
    _text("engine"),
    _text("slot"),  # of a reserved engine in its training job
    _time("joined_at"),
    _maybe_time("left_at"),
    _text("reason"),
    Column("notice", Boolean, nullable=True),  # null while it is here
    _int("samples"),  # in flight when it left
    _int("salvaged"),
    _int("regenerated"),
    Index("ix_workers_intent", "intent_id", "incarnation"),
    Index("ix_workers_left", "left_at"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("intent_id", Text, primary_key=True),
    _int("run_id"),
    _text("partition"),
    _int("gpus"),
    _text("worker_key"),
    _time("intended_at"),
    _int("job_id"),  # 0 = not known to be submitted
    _maybe_time("submitted_at"),
    _text("last_state"),  # derived from job_states, "" = never observed
    _text("flags"),
    _text("reason"),
    _text("node"),
    _int("restart_count"),
    _maybe_time("observed_at"),
    _maybe_time("ended_at"),
    _text("pinned"),  # the nodes that it was submitted for, joined by ','; "": Slurm chooses
    _int("nodes", server_default="1"),
    Index("ix_jobs_ended", "ended_at"),
    Index("ix_jobs_job", "job_id"),
)

job_states = Table(
    "job_states",
    metadata,
    _counted(),
    _text("intent_id"),
    _int("job_id"),
    _text("state"),
    _text("flags"),
    _text("reason"),
    _text("node"),
    _int("restart_count"),
    _time("at"),
    Index("ix_job_states_intent", "intent_id"),
)

gpu_allocations = Table(
    "gpu_allocations",
    metadata,
    Column("intent_id", Text, primary_key=True),
    _key("restart_count"),
    _int("job_id"),
    _text("node"),
    _int("gpus"),
    _time("started_at"),
    _maybe_time("ended_at"),
    _text("reason"),  # "" while it is open
    Index("ix_gpu_allocations_started", "started_at"),
)

cluster_polls = Table(
    "cluster_polls",
    metadata,
    _counted(),
    _int("gpus_idle"),
    _int("gpus_harvested"),
    _int("gpus_other_users"),
    _int("gpus_reserved"),
    _int("gpus_unusable"),
    _int("jobs_pending_other_users"),
    _time("at"),
    Index("ix_cluster_polls_at", "at"),
)

decisions = Table(
    "decisions",
    metadata,
    _counted(),
    _text("policy"),
    _text("action"),
    _text("subject"),
    _text("reason"),
    _text("inputs"),
    _time("at"),
    _text("code"),  # the reason in a word, for queries: a `HarvestCode` or a `PolicyCode`; may be ""
    Index("ix_decisions_at", "at"),
)

events = Table(
    "events",
    metadata,
    _counted(),
    _text("kind"),
    _int("run_id"),
    _text("subject"),
    _text("reason"),
    _text("detail"),
    _time("at"),
    Index("ix_events_kind", "kind", "at"),
)

# ---------------------------------------------------------------- others, and what it cost (0002)

#: One wait of another user's job for GPUs of partitions in whose nodes we held some. A job array is one row.
other_users_waits = Table(
    "other_users_waits",
    metadata,
    _counted(),
    _int("job_id"),
    _text("user_name"),
    _text("partition"),
    _int("gpus"),
    _time("submitted_at"),
    _time("eligible_at"),  # since when it could have started: not before its begin time
    _time("seen_at"),  # the first poll that saw it wait while we held GPUs there
    _maybe_time("started_at"),  # Slurm's; null while it waits, and where it left the queue unseen
    _maybe_time("ended_at"),
    _text("outcome"),  # "" while it waits | started | held (or not waiting for GPUs) | requeued | cancelled
    # | left (the queue, between two polls) | unseen (harvesting was disabled)
    _int("harvested_gpus"),  # the most that we held on the nodes of its partitions meanwhile
    _time("harvested_gpu_s"),  # GPU-seconds that we held there meanwhile
    Index("ix_other_users_waits_job", "job_id"),
    Index("ix_other_users_waits_ended", "ended_at"),
)

#: One life of a run's training job, as Slurm shows it.
training_jobs = Table(
    "training_jobs",
    metadata,
    _counted(),
    _int("run_id"),
    _int("job_id"),
    _text("user_name"),
    _int("nodes"),
    _int("gpus"),
    _time("started_at"),
    _maybe_time("ended_at"),
    Index("ix_training_jobs_run", "run_id", "job_id"),
)

#: One harvested job that ended by its own fault, or its node's.
engine_deaths = Table(
    "engine_deaths",
    metadata,
    _counted(),
    _text("node"),
    _int("run_id"),
    _text("intent_id"),
    _int("job_id"),
    _int("restart_count"),
    Column("exit_code", Int, nullable=True),  # the shell's view; null: Slurm did not say
    _text("reason"),
    _time("lived_s"),
    _time("at"),
    Index("ix_engine_deaths_node", "node"),
)

node_quarantines = Table(
    "node_quarantines",
    metadata,
    _counted(),
    _text("node"),
    _text("reason"),
    _time("at"),
    _time("until_at"),
    _maybe_time(
        "released_at"
    ),  # sooner than `until_at` where the run was at fault, or the daemon was restarted
    Index("ix_node_quarantines_node", "node"),
)
