"""The first release's tables, views and, on PostgreSQL, functions that decode packed arrays.

A revision is never edited after its release: it says what a ledger of that time holds, whatever `schema.py`
says later. The views are for those who may read what happened and not what was said: `sql/roles.sql` grants
them, the reports under `sql/reports` read nothing else. A later revision that changes a column of a view
drops the view first and creates it again, and says so in the release's notes, because grants go with a view.
(On PostgreSQL, CREATE OR REPLACE VIEW adds a column at the end in place, and the grants stay.)
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001_first"
down_revision = None
branch_labels = None
depends_on = None

INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TYPES: dict[str, Any] = {
    "int": INT,
    "text": sa.Text(),
    "time": sa.Double(),
    "bytes": sa.LargeBinary(),
    "bool": sa.Boolean(),
}

# Each line is "type name name ..."; "?" after a type allows null, "#" makes the primary key, "id" is counted by the database.
TABLES: dict[str, tuple[str, ...]] = {
    "generations": (
        "#int generation",
        "text host",
        "int pid",
        "text code_version",
        "time started_at committed_at",
        "int batch",
        "time? superseded_at",
        "text uid timeline",
    ),
    "runs": (
        "#int run_id",
        "text name owner_key",
        "int seed",
        "text config engine tokenizer",
        "time created_at",
        "text state reason",
        "time? ended_at",
        "int attempt resume_step last_step last_version",
        "time? purged_at",
    ),
    "attempts": (
        "#int run_id attempt",
        "text host",
        "int job_id resume_step",
        "text config engine",
        "time started_at",
    ),
    "weight_versions": (
        "#int run_id version",
        "int step attempt",
        "bytes root manifest",
        "int nbytes",
        "time published_at",
    ),
    "steps": (
        "id",
        "int run_id",
        "text purpose",
        "int step attempt version",
        "text metrics",
        "time committed_at",
        "int? rewound_by",
    ),
    "checkpoints": (
        "id",
        "int run_id step version",
        "bytes root",
        "text path",
        "time recorded_at",
        "int? rewound_by",
        "text kept",
    ),
    "groups": (
        "#int group_id",
        "int run_id",
        "text purpose",
        "int step prompt_index retry created_version version",
        "bytes prompt",
        "int n first_sample_id",
        "text sampling meta",
        "time created_at",
        "int delivered_attempt",
        "time? delivered_at",
        "int? purged_prompt_tokens",
    ),
    "samples": (
        "#int sample_id",
        "int group_id run_id sample_index",
        "text state reason finish",
        "int accepted_len epoch moves worker_id regenerated",
        "time? reward advantage",
        "int ended_step ended_attempt",
        "time? finished_at ended_at",
        "text? contents",
        "text reward_version",
    ),
    "sample_ends": (
        "id",
        "int sample_id",
        "text state reason",
        "int step attempt",
        "time? reward advantage",
        "time at",
        "text reward_version",
    ),
    "leases": (
        "#int sample_id epoch",
        "int worker_id version start_len end_len regenerated",
        "text reason",
        "time granted_at",
        "time? ended_at",
    ),
    "move_log": ("id", "int n", "bytes moves", "time at"),
    "chunks": (
        "id",
        "int sample_id epoch start_len n_tokens version worker_id",
        "time at",
        "bytes tokens logprobs raw_logprobs",
    ),
    "workers": (
        "#int worker_id",
        "int run_id",
        "text kind intent_id session",
        "int incarnation job_id",
        "text node",
        "int gpus",
        "text engine slot",
        "time joined_at",
        "time? left_at",
        "text reason",
        "bool? notice",
        "int samples salvaged regenerated",
    ),
    "jobs": (
        "#text intent_id",
        "int run_id",
        "text partition",
        "int gpus",
        "text worker_key",
        "time intended_at",
        "int job_id",
        "time? submitted_at",
        "text last_state flags reason node",
        "int restart_count",
        "time? observed_at ended_at",
        "text pinned",
    ),
    "job_states": (
        "id",
        "text intent_id",
        "int job_id",
        "text state flags reason node",
        "int restart_count",
        "time at",
    ),
    "gpu_allocations": (
        "#text intent_id",
        "#int restart_count",
        "int job_id",
        "text node",
        "int gpus",
        "time started_at",
        "time? ended_at",
        "text reason",
    ),
    "cluster_polls": (
        "id",
        "int gpus_idle gpus_harvested gpus_other_users gpus_reserved gpus_unusable jobs_pending_other_users",
        "time at",
    ),
    "decisions": ("id", "text policy action subject reason inputs", "time at", "text code"),
    "events": ("id", "text kind", "int run_id", "text subject reason detail", "time at"),
}

#: PostgreSQL keeps half of each of their pages free for a row's next version: an update touches no index (HOT).
#: Every flush updates `samples`; with full pages an update cost three times as much as the chunk itself.
UPDATED = ("samples", "leases")

INDEXES: dict[str, tuple[str, str]] = {
    "ix_runs_name": ("runs", "name"),
    "ix_runs_state": ("runs", "state"),
    "ix_steps_run": ("steps", "run_id purpose step"),
    "ix_checkpoints_run": ("checkpoints", "run_id step"),
    "ix_groups_run": ("groups", "run_id purpose step"),
    "ix_samples_group": ("samples", "group_id"),
    "ix_samples_state": ("samples", "state run_id ended_step"),
    "ix_sample_ends_sample": ("sample_ends", "sample_id"),
    "ix_chunks_sample": ("chunks", "sample_id"),
    "ix_workers_intent": ("workers", "intent_id incarnation"),
    "ix_workers_left": ("workers", "left_at"),
    "ix_jobs_ended": ("jobs", "ended_at"),
    "ix_jobs_job": ("jobs", "job_id"),
    "ix_job_states_intent": ("job_states", "intent_id"),
    "ix_gpu_allocations_started": ("gpu_allocations", "started_at"),
    "ix_cluster_polls_at": ("cluster_polls", "at"),
    "ix_decisions_at": ("decisions", "at"),
    "ix_events_kind": ("events", "kind at"),
}


# What a verifier says of a completion that it cannot judge may quote the completion.
_REASON = "CASE WHEN state = 'masked' AND reason <> '' THEN 'hidden (a verifier may quote the completion)' ELSE reason END AS reason"
# The day since 1970 (joins v_days): one database rounds a double that becomes an integer, the other cuts it.
_DAY = "(CAST(at AS bigint) - CASE WHEN CAST(at AS bigint) > at THEN 1 ELSE 0 END) / 86400 AS day"

# View: (columns, table). What is left out: tokens, logprobs, prompts, a prompt's metadata, a run's configuration and engine (which
# may hold a system prompt and paths), manifests, and names of sessions and keys that no report needs.
VIEWS: dict[str, tuple[str, str]] = {
    "v_generations": (
        "generation, timeline, host, pid, code_version, started_at, committed_at, batch, superseded_at",
        "generations",
    ),
    "v_runs": (
        "run_id, name, owner_key, COALESCE((SELECT e.reason FROM events e WHERE e.kind = 'owner_enrolled' AND e.subject = owner_key"
        " ORDER BY e.id DESC LIMIT 1), owner_key) AS owner,"
        " seed, tokenizer, created_at, state, reason, ended_at, attempt, resume_step, last_step, last_version,"
        " purged_at",
        "runs",
    ),
    "v_attempts": ("run_id, attempt, host, job_id, resume_step, started_at", "attempts"),
    "v_weight_versions": ("run_id, version, step, attempt, root, nbytes, published_at", "weight_versions"),
    "v_steps": ("id, run_id, purpose, step, attempt, version, metrics, committed_at, rewound_by", "steps"),
    "v_checkpoints": ("id, run_id, step, version, root, path, recorded_at, rewound_by, kept", "checkpoints"),
    "v_groups": (
        "group_id, run_id, purpose, step, prompt_index, retry, created_version, version,"
        " COALESCE(purged_prompt_tokens, length(prompt) / 4) AS prompt_tokens,"
        " length(prompt) AS prompt_bytes, n,"
        " first_sample_id, sampling, created_at, delivered_attempt, delivered_at",
        "groups",
    ),
    "v_samples": (
        f"sample_id, group_id, run_id, sample_index, state, {_REASON}, finish, accepted_len, epoch, moves, worker_id, regenerated,"
        " reward, advantage, ended_step, ended_attempt, finished_at, ended_at, contents, reward_version",
        "samples",
    ),
    "v_sample_ends": (
        f"id, sample_id, state, {_REASON}, step, attempt, reward, advantage, reward_version, at",
        "sample_ends",
    ),
    "v_leases": (
        "sample_id, epoch, worker_id, version, start_len, end_len, regenerated, reason, granted_at, ended_at",
        "leases",
    ),
    "v_chunks": (
        "id, sample_id, epoch, start_len, n_tokens, version, worker_id, at, length(tokens) AS token_bytes,"
        " length(logprobs) AS logprob_bytes, length(raw_logprobs) AS raw_logprob_bytes",
        "chunks",
    ),
    "v_workers": (
        "worker_id, run_id, kind, intent_id, incarnation, job_id, node, gpus, engine, slot, joined_at, left_at, reason, notice, samples,"
        " salvaged, regenerated",
        "workers",
    ),
    "v_jobs": (
        "intent_id, run_id, partition, gpus, intended_at, job_id, submitted_at, last_state, flags, reason, node, restart_count,"
        " observed_at, ended_at, pinned",
        "jobs",
    ),
    "v_job_states": ("id, intent_id, job_id, state, flags, reason, node, restart_count, at", "job_states"),
    "v_gpu_allocations": (
        "intent_id, restart_count, job_id, node, gpus, started_at, ended_at, reason",
        "gpu_allocations",
    ),
    "v_cluster_polls": (
        f"id, gpus_idle, gpus_harvested, gpus_other_users, gpus_reserved, gpus_unusable, jobs_pending_other_users, at, {_DAY}",
        "cluster_polls",
    ),
    "v_decisions": ("id, policy, action, subject, reason, inputs, at, code", "decisions"),
    "v_events": ("id, kind, run_id, subject, reason, detail, at", "events"),
    # SQL has no clock that both databases spell alike, and of a copy of a ledger one asks what was so then: "now" is the last commit.
    "v_now": ("max(committed_at) AS unix_s", "generations"),
}

# Days in UTC from 1970 to 2099, so that a report needs no date function: the two databases share none.
_DAYS = {
    "sqlite": """
        CREATE VIEW v_days AS
        WITH RECURSIVE d (day) AS (SELECT 0 UNION ALL SELECT day + 1 FROM d WHERE day < 47481)
        SELECT day, date(day * 86400, 'unixepoch') AS day_utc, day * 86400 AS from_unix_s, (day + 1) * 86400 AS to_unix_s FROM d
    """,
    "postgresql": """
        CREATE VIEW v_days AS
        SELECT CAST(d AS bigint) AS day, to_char(DATE '1970-01-01' + d, 'YYYY-MM-DD') AS day_utc,
               CAST(d AS bigint) * 86400 AS from_unix_s, (CAST(d AS bigint) + 1) * 86400 AS to_unix_s
        FROM generate_series(0, 47481) AS d
    """,
}

# The sign bit of the last byte is shifted into that of the integer.
_INT32 = """
CREATE FUNCTION ledger_int32(packed bytea) RETURNS integer[]
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog
AS $$
    SELECT coalesce(array_agg(get_byte(packed, i) | (get_byte(packed, i + 1) << 8) | (get_byte(packed, i + 2) << 16)
                              | (get_byte(packed, i + 3) << 24) ORDER BY i), '{}')
    FROM generate_series(0, length(packed) - 4, 4) AS i
$$
"""
# IEEE 754 binary32. Each product is exact in double precision, where a subnormal float32 is a normal number.
_FLOAT32 = """
CREATE FUNCTION ledger_float32(packed bytea) RETURNS real[]
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog
AS $$
    SELECT coalesce(array_agg(CAST(
        CASE WHEN exponent = 255 AND fraction = 0 THEN CASE WHEN negative THEN '-Infinity' ELSE 'Infinity' END::float8
             WHEN exponent = 255 THEN 'NaN'::float8
             ELSE CASE WHEN negative THEN -1.0::float8 ELSE 1.0::float8 END
                  * CASE WHEN exponent = 0 THEN fraction * power(2.0::float8, -149.0::float8)
                         ELSE (fraction + 8388608) * power(2.0::float8, exponent - 150.0::float8) END
        END AS real) ORDER BY i), '{}')
    FROM (
        SELECT i, get_byte(packed, i + 3) >= 128 AS negative,
               ((get_byte(packed, i + 3) & 127) << 1) | (get_byte(packed, i + 2) >> 7) AS exponent,
               ((get_byte(packed, i + 2) & 127) << 16) | (get_byte(packed, i + 1) << 8) | get_byte(packed, i) AS fraction
        FROM generate_series(0, length(packed) - 4, 4) AS i
    ) AS bits
$$
"""
_TOKENS = """
CREATE VIEW v_sample_tokens AS
SELECT s.sample_id, s.run_id, s.group_id, s.sample_index, s.state, s.contents, s.accepted_len,
       ledger_int32(g.prompt) AS prompt,
       ledger_int32(c.tokens) AS tokens, ledger_float32(c.logprobs) AS logprobs, ledger_float32(c.raw_logprobs) AS raw_logprobs
FROM samples s
JOIN groups g ON g.group_id = s.group_id
CROSS JOIN LATERAL (
    SELECT coalesce(string_agg(k.tokens, '\\x'::bytea ORDER BY k.start_len), '\\x') AS tokens,
           coalesce(string_agg(k.logprobs, '\\x'::bytea ORDER BY k.start_len), '\\x') AS logprobs,
           coalesce(string_agg(k.raw_logprobs, '\\x'::bytea ORDER BY k.start_len), '\\x') AS raw_logprobs
    FROM chunks k
    WHERE k.sample_id = s.sample_id
) c
"""


def _columns(line: str) -> list[sa.Column[Any]]:
    kind, *names = line.split()
    if kind == "id":
        return [sa.Column("id", INT, primary_key=True, autoincrement=True)]
    column_type = _TYPES[kind.strip("#?")]
    if kind.startswith("#"):
        return [sa.Column(name, column_type, primary_key=True, autoincrement=False) for name in names]
    return [sa.Column(name, column_type, nullable=kind.endswith("?")) for name in names]


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    for table, lines in TABLES.items():
        op.create_table(table, *(column for line in lines for column in _columns(line)))
    for index, (table, names) in INDEXES.items():
        op.create_index(index, table, names.split())
    for view, (columns, table) in VIEWS.items():
        op.execute(f"CREATE VIEW {view} AS SELECT {columns} FROM {table}")
    op.execute(_DAYS[dialect])
    if dialect == "postgresql":
        for table in UPDATED:
            op.execute(f"ALTER TABLE {table} SET (fillfactor = 50)")
        for statement in (_INT32, _FLOAT32, _TOKENS):
            # As it is: its colons and percent signs name no parameter.
            op.get_bind().exec_driver_sql(statement)
