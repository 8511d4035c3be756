"""The ledger's tables, as SQLAlchemy Core metadata. Pure; one schema for SQLite and PostgreSQL.

Owns names, types, indexes and meanings (`doc`, `_row`), of which docs/schema.md is made. `migrations/` must add up to exactly this (a
test holds it). Conventions:

- Every integer is 64 bits wide, every time is Unix seconds as a double, every payload is a packed
  little-endian array (`protocol.messages.codec`).
- Ids come from the core, except the `id` of append-only tables, which the database counts.
- There are no foreign keys. The writer batches rows by kind, so a parent may follow its child within a transaction, and a run's
  contents may be purged while its accounting stays. `ledger check` proves the references instead.
- Columns whose meaning begins with "Derived" repeat what other rows say, so that an admin's query needs one table. Only the writer
  keeps them.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Boolean, Column, Double, Index, LargeBinary, MetaData, Table, Text

#: SQLite counts ids by itself only in a column whose type is spelled INTEGER; there it is 64 bits wide too.
Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

metadata = MetaData()


def _int(name: str, doc: str, **options: Any) -> Column[int]:
    return Column(name, Int, nullable=False, doc=doc, **options)


def _key(name: str, doc: str) -> Column[int]:
    return Column(name, Int, primary_key=True, autoincrement=False, doc=doc)


def _counted() -> Column[int]:
    return Column("id", Int, primary_key=True, autoincrement=True, doc="Counted by the database.")


def _text(name: str, doc: str, server_default: str | None = None) -> Column[str]:
    return Column(name, Text, nullable=False, doc=doc, server_default=server_default)


def _time(name: str, doc: str) -> Column[float]:
    return Column(name, Double, nullable=False, doc=doc)


def _maybe_time(name: str, doc: str) -> Column[float | None]:
    return Column(name, Double, nullable=True, doc=doc)


def _bytes(name: str, doc: str) -> Column[bytes]:
    return Column(name, LargeBinary, nullable=False, doc=doc)


def _cluster() -> Column[str]:
    return Column(
        "cluster",
        Text,
        nullable=False,
        server_default=sa.text("''"),
        doc="The further cluster, as `scavenger keys cluster` named it; empty: the daemon's own. Slurm's job ids count within it.",
    )


def _row(meaning: str) -> dict[str, Any]:
    """What one row is."""
    return {"info": {"row": meaning}}


#: PostgreSQL keeps half of each page free: a row's next version stays on its page, and no index changes.
_UPDATED: dict[str, Any] = {"postgresql_with": {"fillfactor": 50}}

# ---------------------------------------------------------------- who writes

#: One row for each life of a daemon on this ledger. Every transaction of the writer moves `batch` from n to n + 1 on its own row,
#: which fences (a superseded row is not moved) and tells, after a lost connection, whether the last commit took place.
generations = Table(
    "generations",
    metadata,
    _key("generation", "Number of this life of a daemon, one more than the one before."),
    _text("host", "Host that it runs on."),
    _int("pid", "Its process id."),
    _text("code_version", "Its version of scavenger."),
    _time("started_at", "When it took the ledger over."),
    _time("committed_at", "Its last commit, and its heartbeat: every 5 s at least."),
    _int(
        "batch",
        "Transactions that it has committed. Each moves it from n to n + 1, which fences: a superseded row is not moved.",
    ),
    _maybe_time(
        "superseded_at",
        "Since when it may not write: another took over, or it was stopped. Null while it may.",
    ),
    _text("uid", "Its random name: numbers are used again after an older ledger was restored, this is not."),
    _text(
        "timeline", "The ledger's history: the same in all generations, until an older ledger is restored."
    ),
    **_row("one life of a daemon on this ledger; only the newest may write"),
)

# ---------------------------------------------------------------- runs

runs = Table(
    "runs",
    metadata,
    _key("run_id", "Number of the run."),
    _text("name", "The run's `run.name`. A name is used again once its run has ended."),
    _text("owner_key", "Public key of its owner."),
    _int("seed", "What its data's order and every sample's random numbers are drawn from."),
    _text("config", "The first attempt's configuration, as JSON."),
    _text("engine", "The first attempt's engine, as JSON."),
    _text("tokenizer", "Path of its `tokenizer.json` on the trainer's host."),
    _time("created_at", "When it was opened first."),
    _text("state", "`active`, `finished`, `failed` or `stopped`."),
    _text("reason", "Why it ended; empty while it is active."),
    _maybe_time("ended_at", "When it ended; null while it is active."),
    _int("attempt", "Derived: the newest attempt."),
    _int("resume_step", "Derived: the step that the newest attempt started from."),
    _int("last_step", "Derived: the last train step that survives."),
    _int("last_version", "Derived: the highest version published, 0 for none."),
    _maybe_time(
        "purged_at",
        "When `ledger purge` took the contents of what it had generated until then; null for never.",
    ),
    Index("ix_runs_name", "name"),
    Index("ix_runs_state", "state"),
    **_row("a run: who owns it, how far it is, how it ended"),
)

attempts = Table(
    "attempts",
    metadata,
    _key("run_id", "The run."),
    _key("attempt", "Number of the attempt, from 1."),
    _text("host", "Host of the trainer's rank 0."),
    _int("job_id", "Slurm's id of the training job; 0 outside Slurm."),
    _int("resume_step", "Step of the checkpoint that it started from; 0 for none."),
    _text("config", "Its configuration, as JSON."),
    _text("engine", "Its engine, as JSON."),
    _time("started_at", "When the daemon granted it."),
    **_row("one life of a run's trainer"),
)

weight_versions = Table(
    "weight_versions",
    metadata,
    _key("run_id", "The run."),
    _key("version", "Number of the version, ascending within the run."),
    _int("step", "The train step after which it was published; 0 for the weights that a run starts from."),
    _int("attempt", "The attempt that published it."),
    _bytes("root", "Root hash of its tensors, which an engine's weights must have."),
    _bytes("manifest", "Names, shapes, types and hashes of its tensors."),
    _int("nbytes", "Bytes of its tensors."),
    _time("published_at", "When it was published."),
    **_row("a published version of a run's weights"),
)

#: A step may be committed once by each attempt; the one that survives has no `rewound_by` (the attempt that went back before it).
steps = Table(
    "steps",
    metadata,
    _counted(),
    _int("run_id", "The run."),
    _text("purpose", "`train` or `eval`."),
    _int("step", "Train step, from 1."),
    _int("attempt", "The attempt that committed it."),
    _int("version", "The version that came of a train step, or that was evaluated."),
    _text("metrics", "The trainer's metrics of it, a JSON object of numbers."),
    _time("committed_at", "When it was committed."),
    Column(
        "rewound_by", Int, nullable=True, doc="The attempt that went back before it; null where it survives."
    ),
    Index("ix_steps_run", "run_id", "purpose", "step"),
    **_row("a committed train step or evaluation, once for each attempt that committed it"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _counted(),
    _int("run_id", "The run."),
    _int("step", "The train step that it holds."),
    _int("version", "The version of its weights."),
    _bytes("root", "Root hash of its weights."),
    _text("path", "Its folder, as the trainer names it."),
    _time("recorded_at", "When it was complete."),
    Column(
        "rewound_by", Int, nullable=True, doc="The attempt that went back before it; null where it survives."
    ),
    _text("kept", "Steps whose checkpoints the trainer kept from then on, as JSON; empty: it did not say."),
    Index("ix_checkpoints_run", "run_id", "step"),
    **_row("a complete checkpoint of a run's trainer"),
)

# ---------------------------------------------------------------- groups and samples

groups = Table(
    "groups",
    metadata,
    _key("group_id", "Number of the group."),
    _int("run_id", "The run."),
    _text("purpose", "`train`, `eval` or `turn`."),
    _int(
        "step", "The train step that it is for; of a turn the step that was under way when it was asked for."
    ),
    _int("prompt_index", "Place of the prompt within the step; of a turn the group's id."),
    _int("retry", "How often this place was given up before."),
    _int("created_version", "Version under which it was created."),
    _int("version", "Version under which it goes on, after a later attempt adopted it."),
    _bytes(
        "prompt", "Token ids, packed int32; of a turn what it adds to its parent's prompt and completion."
    ),
    _int("n", "How many samples it has."),
    _int("first_sample_id", "Its samples are this one and the `n` - 1 that follow."),
    _text("sampling", "Sampling parameters, as JSON."),
    _text("meta", "What the trainer keeps with the prompt, as JSON."),
    _time("created_at", "When it was submitted."),
    _int("delivered_attempt", "The attempt that it was delivered to last; 0 for never."),
    _maybe_time("delivered_at", "When it was delivered last; null for never."),
    Column(
        "purged_prompt_tokens",
        Int,
        nullable=True,
        doc="The prompt's length in tokens, once a purge emptied it; null before.",
    ),
    Index("ix_groups_run", "run_id", "purpose", "step"),
    **_row("one prompt with its `n` samples: of a train step, of an evaluation, or an agent's turn"),
)

samples = Table(
    "samples",
    metadata,
    _key("sample_id", "Number of the sample."),
    _int("group_id", "Its group."),
    _int("run_id", "The run."),
    _int("sample_index", "Its place in the group, from 0."),
    _text(
        "state",
        "`open`, `complete`, and then `consumed` (trained), `filtered` (every reward of its group is "
        "equal), `masked` (not usable), `evaluated`, `served` (a turn whose episode ended), `surplus`"
        " (the run or the episode ended first), `superseded` (its prompt was generated again) or "
        "`poisoned` (given up).",
    ),
    _text("reason", "Why it ended so; empty where there is none to give."),
    _text(
        "finish",
        "Why generation ended: `stop` (a stop token), `length` (the budget), empty while it goes on.",
    ),
    _int("accepted_len", "Derived: tokens that are durable."),
    _int("epoch", "Derived: the highest epoch that a lease had; 0 for never leased."),
    _int("moves", "Derived: leases that went on after tokens of an earlier one."),
    _int("worker_id", "Derived: the engine of the newest lease; 0 for never leased."),
    _int("regenerated", "Derived: tokens that had to be generated again, over all its leases."),
    Column("reward", Double, nullable=True, doc="Its reward; null for none."),
    Column(
        "advantage", Double, nullable=True, doc="Its advantage, of a rewarded turn the turn's; null for none."
    ),
    _int("ended_step", "The step that took it; 0 for none."),
    _int("ended_attempt", "The attempt of that step; 0 for none."),
    _maybe_time("finished_at", "When its last token was accepted."),
    _maybe_time("ended_at", "When it ended."),
    Column(
        "contents",
        Text,
        nullable=True,
        doc="What became of its tokens: null as they came, `compacted`, `dropped` or `purged`.",
    ),
    _text("reward_version", "Version of the function that gave the reward; empty for none."),
    Index("ix_samples_group", "group_id"),
    Index("ix_samples_state", "state", "run_id", "ended_step"),
    **_row("one completion, generated or to be generated"),
    **_UPDATED,
)

#: Every end and reopening of a sample, in order. `samples` keeps the last one; an audit of I3 needs them all.
sample_ends = Table(
    "sample_ends",
    metadata,
    _counted(),
    _int("sample_id", "The sample."),
    _text("state", "As `samples.state`, or `reopened` (a later attempt trains on it again)."),
    _text("reason", "Why; may be empty."),
    _int("step", "The step that took it; 0 for none."),
    _int("attempt", "The attempt of that step, or the one that it was reopened for."),
    Column("reward", Double, nullable=True, doc="Its reward then."),
    Column("advantage", Double, nullable=True, doc="Its advantage then."),
    _time("at", "When."),
    _text("reward_version", "Version of the function that gave the reward."),
    Index("ix_sample_ends_sample", "sample_id"),
    **_row("each end and each reopening of a sample, in order; `samples` keeps the last one"),
)

leases = Table(
    "leases",
    metadata,
    _key("sample_id", "The sample."),
    _key("epoch", "From 1, one more with each lease of the sample: tokens of an older one are refused."),
    _int("worker_id", "The engine."),
    _int("version", "The version of the weights."),
    _int("start_len", "Accepted tokens when it was granted."),
    _int("end_len", "Accepted tokens when it ended."),
    _int("regenerated", "Tokens that were known to be lost with it: generated and never durable."),
    _text("reason", "Why it ended; empty while it is open."),
    _time("granted_at", "When it was granted."),
    _maybe_time("ended_at", "When it ended; null while it is open."),
    **_row("a sample's stay at one engine"),
    **_UPDATED,
)

#: Moves of many samples at once that are durable here and not in `leases` and `samples` yet (`moves`): empty but for moments.
move_log = Table(
    "move_log",
    metadata,
    _counted(),
    _int("n", "How many moves."),
    _bytes("moves", "A msgpack list of `records.LeaseMoved`, each as an array of its fields."),
    _time("at", "When."),
    **_row(
        "moves of many samples at once that are durable here and not in `leases` and `samples` yet: empty but for moments"
    ),
)

#: The hot table: appended to and read; only retention and a purge touch rows, of samples that are final. It has no unique key but the
#: row number, because a unique composite key costs several times the insert itself; that offsets join up is proved by the core, by
#: every snapshot, by compaction and by `ledger check`. Empty payloads: the sample's contents were dropped or purged.
chunks = Table(
    "chunks",
    metadata,
    _counted(),
    _int("sample_id", "The sample."),
    _int("epoch", "The lease's."),
    _int("start_len", "Offset of its first token within the completion."),
    _int("n_tokens", "How many tokens."),
    _int("version", "The version of the weights."),
    _int("worker_id", "The engine that generated it."),
    _time("at", "When it was accepted."),
    _bytes("tokens", "Token ids, packed int32; empty once retention or a purge took them."),
    _bytes("logprobs", "Packed float32, under the sampling distribution."),
    _bytes("raw_logprobs", "Packed float32, under the raw model."),
    Column(
        "routing",
        LargeBinary,
        nullable=True,
        doc="Experts of each token, equally many bytes for each; empty where engines do not report them, "
        "null in rows of before revision 0002.",
    ),
    Index("ix_chunks_sample", "sample_id"),
    **_row("consecutive tokens of a sample with their logprobs"),
)

#: One row for each sample and each step that trained it, of the share of groups that `monitor.token_differences` names.
token_differences = Table(
    "token_differences",
    metadata,
    _counted(),
    _int("sample_id", "The sample."),
    _int("step", "The train step that was taken with it."),
    _int("attempt", "The attempt of that step."),
    _int("n_tokens", "How many tokens: all of the completion."),
    Column("mean", Double, nullable=False, doc="Mean of the absolute differences, in nats."),
    _bytes(
        "differences",
        "The trainer's logprob under the weights at the step's start, less the engine's (`chunks.logprobs`), of each token in nats: packed "
        "float16, 2 bytes a token; empty once retention or a purge took them.",
    ),
    Index("ix_token_differences_sample", "sample_id"),
    **_row("how far trainer and engine were apart at each token of a sample that a step trained"),
)

# ---------------------------------------------------------------- episodes

episodes = Table(
    "episodes",
    metadata,
    _key("episode_id", "Number of the episode."),
    _int("run_id", "The run."),
    _text("name", "The gateway's name of it, of no other episode of the run."),
    _text("state", "`open`, `ended` by its gateway, or `stopped` with its run."),
    _text("reason", "Why it ended; empty while it is open."),
    _time("begun_at", "When its first turn was asked for."),
    _maybe_time("ended_at", "When it ended; null while it is open."),
    _text(
        "worker",
        "The environment worker that played it to its end: its host, and its job where it has one of its own. Empty: none is known.",
    ),
    _int(
        "spent_turns",
        "Turns of other policies whose part in it ended before it did: they stay in its budget.",
        server_default="0",
    ),
    _int("spent_tokens", "Tokens of these.", server_default="0"),
    Index("ix_episodes_run", "run_id", "state"),
    **_row("one agent on one task, as a gateway names it"),
)

#: A turn is a group of `groups`, with its samples, leases and chunks; this is its place in an episode. Its prompt begins with the first
#: `prefix_len` tokens of its parent's prompt and completion, and `groups.prompt` holds the rest alone (`read.prompts` joins them).
turns = Table(
    "turns",
    metadata,
    _key("group_id", "Its group."),
    _int("episode_id", "Its episode."),
    _int("run_id", "The run."),
    _int("number", "From 1 within the episode."),
    _bytes("request", "SHA-256 of what names the caller's request."),
    _bytes("content", "SHA-256 of what it asked for."),
    _time("begun_at", "When it was asked for."),
    _int(
        "parent_id",
        "The sample of an earlier turn with whose prompt and completion its prompt begins; 0 for none.",
    ),
    _int("prefix_len", "For how many tokens."),
    _int("prompt_tokens", "Tokens of the whole prompt."),
    _bytes("prompt_sha256", "SHA-256 of the whole prompt's tokens; empty once they are purged."),
    Column(
        "reward",
        Double,
        nullable=True,
        doc="Which part of the episode's reward (`samples.reward`) it earned; null where its environment does not reward turns, and in "
        "rows of before revision 0005.",
    ),
    Index("ix_turns_episode", "episode_id"),
    **_row("one turn of an episode: what its group in `groups` adds to an earlier turn"),
)

#: A turn's sample that is complete: by this hash a later turn of the episode finds what its prompt begins with.
turn_samples = Table(
    "turn_samples",
    metadata,
    _key("sample_id", "The sample."),
    _bytes("sha256", "SHA-256 of the tokens of its prompt and completion."),
    **_row("a complete sample of a turn: by its digest a later turn finds what its prompt begins with"),
)

tool_calls = Table(
    "tool_calls",
    metadata,
    _key("call_id", "Number of the call."),
    _int("episode_id", "Its episode."),
    _int("run_id", "The run."),
    _text(
        "call",
        "Its name within the episode: of what was asked, and how often the agent had asked that before.",
    ),
    _text("tool", "The tool, as `SERVER.TOOL`."),
    _bytes("asker", "Random, of the life of the environment worker that asked."),
    Column(
        "answer",
        LargeBinary,
        nullable=True,
        doc="What it answered, JSON; null while no answer is known, empty once it is purged.",
    ),
    _time("asked_at", "When it was to be asked: durable before it was."),
    _maybe_time("answered_at", "When its answer came; null: none did."),
    Index("ix_tool_calls_episode", "episode_id"),
    **_row("one call of a tool with effects outside, which is asked once"),
)

#: Several policies in one environment: `run_id` is the run whose policy said it, `source_run_id` the one that played the episode.
deliveries = Table(
    "deliveries",
    metadata,
    _key("delivery_id", "Number of the delivery."),
    _int("run_id", "The run whose policy said it, and whose trainer gets it."),
    _int("source_run_id", "The run that played the episode."),
    _int("episode_id", "The run's own part of the episode, which has the turns."),
    _int("group_delivery_id", "The first delivery of the same group: their rewards are compared."),
    _int("step", "The train step of the run that played."),
    _int("prompt_index", "Place of the task within that step."),
    _int("episode_index", "Place of the episode within its group."),
    Column("reward", Double, nullable=False, doc="This policy's."),
    _int("version", "The oldest weights of the run that its turns are of."),
    _bytes("episode_rows", "MessagePack of the rows to train; empty once they are purged."),
    _text(
        "state",
        "`due`; `consumed`, `filtered` or `masked` by a step; `stale` (its weights were too old), `dropped` (too many were due, or the run "
        "ended first), or `served` (the run takes no steps).",
    ),
    _text("reason", "Why it ended so; empty where nothing is to be said."),
    _int("ended_step", "The step of the run that took it; 0 for none."),
    _int("ended_attempt", "Its attempt; 0 for none."),
    Column("advantage", Double, nullable=True, doc="Its advantage in that step; null where no step took it."),
    _time("delivered_at", "When it was delivered."),
    _maybe_time(
        "ended_at", "When its state became final, unless a resume takes the step back; null while it is due."
    ),
    Index("ix_deliveries_run", "run_id", "state"),
    Index("ix_deliveries_episode", "episode_id"),
    **_row(
        "what one run's policy said in one episode that another run played, on its way to that policy's trainer"
    ),
)

delivered_turns = Table(
    "delivered_turns",
    metadata,
    _key("group_id", "The turn's group: a turn is delivered once."),
    _int("run_id", "The run whose policy said it."),
    _int("delivery_id", "Its delivery."),
    Column(
        "advantage",
        Double,
        nullable=True,
        doc="Its advantage in the step that took the delivery; null where none did, in rows of before revision 0006, and where the "
        "environment does not reward turns: then it is the delivery's.",
    ),
    Index("ix_delivered_turns_delivery", "delivery_id"),
    **_row("one turn of a delivery"),
)

# ---------------------------------------------------------------- workers, jobs, cluster

workers = Table(
    "workers",
    metadata,
    _key("worker_id", "Number of the worker."),
    _int("run_id", "The run."),
    _text("kind", "`harvested` or `reserved`."),
    _text("intent_id", "Its job in `jobs`; empty for a reserved engine."),
    _text("session", "Random name of the process."),
    _int("incarnation", "Restart count of its job when it began."),
    _int("job_id", "Slurm's job id."),
    _text("node", "The node; of an engine of several nodes all of them, joined by `,`."),
    _int("gpus", "GPUs that it has, on all its nodes."),
    _text("engine", "Its engine: `vllm` or `reference`."),
    _text("slot", "Which engine of its training job it is; empty for harvested ones."),
    _time("joined_at", "When it registered."),
    _maybe_time("left_at", "When it left; null while it is here."),
    _text("reason", "Why it left."),
    Column(
        "notice", Boolean, nullable=True, doc="Whether it said goodbye before it went; null while it is here."
    ),
    _int("samples", "Samples in flight when it left."),
    _int("salvaged", "Their tokens that were durable then, and went on elsewhere."),
    _int("regenerated", "Their tokens that were lost with it."),
    _cluster(),
    Index("ix_workers_intent", "intent_id", "incarnation"),
    Index("ix_workers_left", "left_at"),
    **_row("one engine process"),
)

jobs = Table(
    "jobs",
    metadata,
    Column(
        "intent_id",
        Text,
        primary_key=True,
        doc="Names the job before Slurm gave it a number: it is in the job's name.",
    ),
    _int("run_id", "The run that it was submitted for."),
    _text("partition", "Slurm's partition."),
    _int("gpus", "GPUs on all of its nodes."),
    _text("worker_key", "Public key of its engine; empty where it runs none."),
    _time("intended_at", "When its submission was decided."),
    _int("job_id", "Slurm's job id; 0: not known to be submitted."),
    _maybe_time("submitted_at", "When `sbatch` replied."),
    _text(
        "last_state", "Derived: the last state of `job_states`, or what it ended as; empty: never observed."
    ),
    _text("flags", "Derived: Slurm's flags of that state, joined by `,`."),
    _text("reason", "Derived: Slurm's reason of that state, or why it ended."),
    _text("node", "Derived: where it ran then."),
    _int("restart_count", "Derived: how often Slurm had requeued it."),
    _maybe_time("observed_at", "When that state was observed."),
    _maybe_time("ended_at", "When it ended; null while it may run again."),
    _text("pinned", "The nodes that it was submitted for, joined by `,`; empty: Slurm chooses."),
    _int("nodes", "On how many nodes its engine runs.", server_default="1"),
    _cluster(),
    _text(
        "kind", "What it runs: `engine`, or `environment` (an environment worker).", server_default="engine"
    ),
    Index("ix_jobs_ended", "ended_at"),
    Index("ix_jobs_job", "job_id"),
    **_row("one harvested Slurm job, from intent to end"),
)

job_states = Table(
    "job_states",
    metadata,
    _counted(),
    _text("intent_id", "Its job in `jobs`."),
    _int("job_id", "Slurm's job id."),
    _text("state", "Slurm's state."),
    _text("flags", "Slurm's flags, joined by `,`."),
    _text("reason", "Slurm's reason."),
    _text("node", "Where it runs; empty while it does not."),
    _int("restart_count", "How often Slurm had requeued it."),
    _time("at", "When a poll saw it."),
    Index("ix_job_states_intent", "intent_id"),
    **_row("each change of such a job's state that was observed"),
)

gpu_allocations = Table(
    "gpu_allocations",
    metadata,
    Column("intent_id", Text, primary_key=True, doc="Its job in `jobs`."),
    _key("restart_count", "How often Slurm had requeued the job before."),
    _int("job_id", "Slurm's job id."),
    _text("node", "The node; of an engine of several nodes all of them, joined by `,`."),
    _int("gpus", "GPUs on all of its nodes."),
    _time("started_at", "When the job got them."),
    _maybe_time("ended_at", "When they were free again; null while it has them."),
    _text(
        "reason",
        "What ended it: `preempted`, `cancelled`, `completed`, `failed`, `node_fail`, `timeout`, "
        "`requeued` or `unknown`; empty while it is open.",
    ),
    Index("ix_gpu_allocations_started", "started_at"),
    **_row("one allocation of GPUs to such a job: `(intent_id, restart_count)` names it"),
)

job_runs = Table(
    "job_runs",
    metadata,
    _counted(),
    _text("intent_id", "The job in `jobs`, whose `run_id` is the run that it works for now."),
    _int("run_id", "The run that it worked for before."),
    _time("since_at", "From when on: its intent, or its change of hands before."),
    _time("until_at", "When it changed hands."),
    Index("ix_job_runs_intent", "intent_id"),
    **_row("one run that such a job worked for until its engine changed hands"),
)

cluster_polls = Table(
    "cluster_polls",
    metadata,
    _counted(),
    _int("gpus_idle", "GPUs of the harvest partition's usable nodes that nobody has."),
    _int("gpus_harvested", "Its GPUs that harvested jobs have."),
    _int("gpus_other_users", "Its GPUs that other jobs have."),
    _int("gpus_reserved", "GPUs of nodes outside the harvest partition."),
    _int("gpus_unusable", "GPUs that nobody has, of its nodes that are down, drained or otherwise out."),
    _int(
        "jobs_pending_other_users", "Other users' jobs that wait for GPUs of the harvest partition's nodes."
    ),
    _time("at", "When."),
    _cluster(),
    Index("ix_cluster_polls_at", "at"),
    **_row("GPUs by owner at one poll of the cluster"),
)

decisions = Table(
    "decisions",
    metadata,
    _counted(),
    _text(
        "policy",
        "Who decided: `harvest`, `environment` (jobs of environment workers), or a policy of a run (`placement`, `affinity`, `rebalance`,"
        " `window`, `engines`, `agreement`).",
    ),
    _text("action", "What was decided."),
    _text("subject", "About what: a job, node, sample or engine."),
    _text("reason", "Why, in words."),
    _text("inputs", "What it was decided from, as JSON."),
    _time("at", "When."),
    _text("code", "The reason in a word, for queries: a `HarvestCode` or a `PolicyCode`; may be empty."),
    _cluster(),
    Index("ix_decisions_at", "at"),
    **_row("what a policy decided, on what inputs, and why"),
)

events = Table(
    "events",
    metadata,
    _counted(),
    _text("kind", "What happened, in a word."),
    _int("run_id", "The run that it concerns; 0 for none."),
    _text("subject", "What it happened to."),
    _text("reason", "Why, in words."),
    _text("detail", "More, as JSON."),
    _time("at", "When."),
    Index("ix_events_kind", "kind", "at"),
    **_row(
        "anything else: refused chunks, quarantined nodes, an unreachable scheduler, keys that came into force"
    ),
)

# ---------------------------------------------------------------- others, and what it cost (0002)

#: One wait of another user's job for GPUs of the harvest partition's nodes, or of nodes of which we held some. A job array is one row.
other_users_waits = Table(
    "other_users_waits",
    metadata,
    _counted(),
    _int("job_id", "Slurm's id of the job that waits."),
    _text("user_name", "Whose job it is."),
    _text("partition", "The partitions that it was submitted to."),
    _int("gpus", "GPUs that it asks for."),
    _time("submitted_at", "When it was submitted (Slurm's time)."),
    _time("eligible_at", "Since when it could have started: not before its begin time (Slurm's time)."),
    _time("seen_at", "The first poll that saw it wait."),
    _maybe_time(
        "started_at",
        "When it started (Slurm's time); null while it waits, and where it left the queue unseen.",
    ),
    _maybe_time("ended_at", "When the wait was seen to be over; null while it waits."),
    _text(
        "outcome",
        "`started`, `held` (or it waits for something else than GPUs), `requeued`, `cancelled`, "
        "`left` (the queue, between two polls) or `unseen` (harvesting was disabled); empty while it "
        "waits.",
    ),
    _int(
        "harvested_gpus",
        "The most GPUs that we held on the nodes of its partitions meanwhile; 0 = a wait without us.",
    ),
    _time("harvested_gpu_s", "GPU-seconds that we held there meanwhile."),
    _cluster(),
    Index("ix_other_users_waits_job", "job_id"),
    Index("ix_other_users_waits_ended", "ended_at"),
    **_row(
        "one wait of another user's job for GPUs, seen while we held some on nodes of its partitions; a job array is one row"
    ),
)

#: One life of a run's training job, as Slurm shows it.
training_jobs = Table(
    "training_jobs",
    metadata,
    _counted(),
    _int("run_id", "The run."),
    _int("job_id", "Slurm's job id."),
    _text("user_name", "Its Unix user."),
    _text(
        "account",
        "Its Slurm account; empty where Slurm has none for it, for one because it keeps no accounts.",
    ),
    _int("nodes", "Its nodes."),
    _int("gpus", "Its GPUs."),
    _time("started_at", "When it began (Slurm's time)."),
    _maybe_time("ended_at", "When it ended (Slurm's time); null while it runs."),
    Index("ix_training_jobs_run", "run_id", "job_id"),
    **_row("one life of a run's training job, as Slurm shows it"),
)

#: One harvested job that ended by its own fault, or its node's.
engine_deaths = Table(
    "engine_deaths",
    metadata,
    _counted(),
    _text("node", "The node."),
    _int("run_id", "The run."),
    _text("intent_id", "Its job in `jobs`."),
    _int("job_id", "Slurm's job id."),
    _int("restart_count", "How often Slurm had requeued it."),
    Column("exit_code", Int, nullable=True, doc="As a shell shows it; null: Slurm did not say."),
    _text("reason", "Slurm's state and reason, in words."),
    _time("lived_s", "Seconds that it ran."),
    _time("at", "When it was seen."),
    _cluster(),
    Index("ix_engine_deaths_node", "node"),
    **_row("one harvested job that ended by its own fault, or its node's"),
)

node_quarantines = Table(
    "node_quarantines",
    metadata,
    _counted(),
    _text("node", "The node."),
    _text("reason", "Why it gets no engine."),
    _time("at", "Since when."),
    _time("until_at", "Until when."),
    _maybe_time(
        "released_at", "Sooner than that, where the run was at fault or the daemon was restarted; null else."
    ),
    _cluster(),
    Index("ix_node_quarantines_node", "node"),
    **_row("one quarantine of a node"),
)
