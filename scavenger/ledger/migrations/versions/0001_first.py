"""The first tables. A revision is never edited after a release: it says what a ledger of that time holds."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TYPES: dict[str, Any] = {"int": INT, "text": sa.Text(), "time": sa.Double(), "bytes": sa.LargeBinary(), "bool": sa.Boolean()}

# Each line is "type name name ..."; "?" after a type allows null, "#" makes the primary key, "id" is counted by the database.
TABLES: dict[str, tuple[str, ...]] = {
    "generations": (
        "#int generation", "text host", "int pid", "text code_version", "time started_at committed_at", "int batch",
        "time? superseded_at",
    ),
    "runs": (
        "#int run_id", "text name owner_key", "int seed", "text config engine tokenizer", "time created_at", "text state reason",
        "time? ended_at", "int attempt resume_step last_step last_version",
    ),
    "attempts": ("#int run_id attempt", "text host", "int job_id resume_step", "text config engine", "time started_at"),
    "weight_versions": (
        "#int run_id version", "int step attempt", "bytes root manifest", "int nbytes", "time published_at",
    ),
    "steps": (
        "id", "int run_id", "text purpose", "int step attempt version", "text metrics", "time committed_at", "int? rewound_by",
    ),
    "checkpoints": ("id", "int run_id step version", "bytes root", "text path", "time recorded_at", "int? rewound_by"),
    "groups": (
        "#int group_id", "int run_id", "text purpose", "int step prompt_index take created_version version", "bytes prompt",
        "int n first_sample_id", "text sampling meta", "time created_at", "int delivered_attempt", "time? delivered_at",
    ),
    "samples": (
        "#int sample_id", "int group_id run_id sample_index", "text state reason finish",
        "int accepted_len epoch moves worker_id regenerated", "time? reward advantage", "int ended_step ended_attempt",
        "time? finished_at ended_at",
    ),
    "sample_ends": ("id", "int sample_id", "text state reason", "int step attempt", "time? reward advantage", "time at"),
    "leases": (
        "#int sample_id epoch", "int worker_id version start_len end_len regenerated", "text reason", "time granted_at",
        "time? ended_at",
    ),
    "chunks": (
        "id", "int sample_id epoch start_len n_tokens version worker_id", "time at", "bytes tokens logprobs raw_logprobs",
    ),
    "workers": (
        "#int worker_id", "int run_id", "text kind intent_id session", "int incarnation job_id", "text node", "int gpus",
        "text engine", "time joined_at", "time? left_at", "text reason", "bool? notice", "int samples salvaged regenerated",
    ),
    "jobs": (
        "#text intent_id", "int run_id", "text partition", "int gpus", "text worker_key", "time intended_at", "int job_id",
        "time? submitted_at", "text last_state flags reason node", "int restart_count", "time? observed_at ended_at",
    ),
    "job_states": ("id", "text intent_id", "int job_id", "text state flags reason node", "int restart_count", "time at"),
    "holds": (
        "#text intent_id", "#int restart_count", "int job_id", "text node", "int gpus", "time started_at", "time? ended_at",
        "text reason",
    ),
    "cluster_samples": ("id", "int idle harvested others reserved unusable pending_others", "time at"),
    "decisions": ("id", "text policy action subject reason inputs", "time at"),
    "events": ("id", "text kind", "int run_id", "text subject reason detail", "time at"),
}  # fmt: skip

INDEXES: dict[str, tuple[str, str]] = {
    "ix_runs_name": ("runs", "name"),
    "ix_runs_state": ("runs", "state"),
    "ix_steps_run": ("steps", "run_id purpose step"),
    "ix_checkpoints_run": ("checkpoints", "run_id step"),
    "ix_groups_run": ("groups", "run_id purpose step"),
    "ix_samples_group": ("samples", "group_id"),
    "ix_samples_state": ("samples", "state run_id ended_step"),
    "ix_sample_ends_sample": ("sample_ends", "sample_id"),
    "ix_leases_worker": ("leases", "worker_id"),
    "ix_chunks_sample": ("chunks", "sample_id"),
    "ix_workers_intent": ("workers", "intent_id incarnation"),
    "ix_workers_left": ("workers", "left_at"),
    "ix_jobs_ended": ("jobs", "ended_at"),
    "ix_jobs_job": ("jobs", "job_id"),
    "ix_job_states_intent": ("job_states", "intent_id"),
    "ix_holds_started": ("holds", "started_at"),
    "ix_cluster_samples_at": ("cluster_samples", "at"),
    "ix_decisions_at": ("decisions", "at"),
    "ix_events_kind": ("events", "kind at"),
}


def _columns(line: str) -> list[sa.Column[Any]]:
    kind, *names = line.split()
    if kind == "id":
        return [sa.Column("id", INT, primary_key=True, autoincrement=True)]
    column_type = _TYPES[kind.strip("#?")]
    if kind.startswith("#"):
        return [sa.Column(name, column_type, primary_key=True, autoincrement=False) for name in names]
    return [sa.Column(name, column_type, nullable=kind.endswith("?")) for name in names]


def upgrade() -> None:
    for table, lines in TABLES.items():
        op.create_table(table, *(column for line in lines for column in _columns(line)))
    for index, (table, names) in INDEXES.items():
        op.create_index(index, table, names.split())


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
