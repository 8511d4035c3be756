"""Views for those who may read what happened but not what was said, and PostgreSQL's functions that decode packed arrays.

`sql/roles.sql` grants these views; the reports under `sql/reports` read nothing else. A later revision that changes a column of a
view drops the view first and creates it again, and says so in the release's notes, because grants go with a view.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# What a verifier says of an answer that it cannot judge may quote the answer.
_REASON = "CASE WHEN state = 'masked' AND reason <> '' THEN 'hidden (a verifier may quote the answer)' ELSE reason END AS reason"
# The day since 1970 (joins v_days): one database rounds a double that becomes an integer, the other cuts it.
_DAY = "(CAST(at AS bigint) - CASE WHEN CAST(at AS bigint) > at THEN 1 ELSE 0 END) / 86400 AS day"

# View: (columns, table). What is left out: tokens, logprobs, prompts, a prompt's metadata, a run's configuration and engine (which
# may hold a system prompt and paths), manifests, and names of sessions and keys that no report needs.
VIEWS: dict[str, tuple[str, str]] = {
    "v_generations": ("generation, timeline, host, pid, code_version, started_at, committed_at, batch, superseded_at", "generations"),
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
    "v_checkpoints": ("id, run_id, step, version, root, path, recorded_at, rewound_by", "checkpoints"),
    "v_groups": (
        "group_id, run_id, purpose, step, prompt_index, take, created_version, version,"
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
    "v_sample_ends": (f"id, sample_id, state, {_REASON}, step, attempt, reward, advantage, reward_version, at", "sample_ends"),
    "v_leases": (
        "sample_id, epoch, worker_id, version, start_len, end_len, regenerated, reason, granted_at, ended_at", "leases",
    ),
    "v_chunks": (
        "id, sample_id, epoch, start_len, n_tokens, version, worker_id, at, length(tokens) AS token_bytes,"
        " length(logprobs) AS logprob_bytes, length(raw_logprobs) AS raw_logprob_bytes",
        "chunks",
    ),
    "v_workers": (
        "worker_id, run_id, kind, intent_id, incarnation, job_id, node, gpus, engine, joined_at, left_at, reason, notice, samples,"
        " salvaged, regenerated",
        "workers",
    ),
    "v_jobs": (
        "intent_id, run_id, partition, gpus, intended_at, job_id, submitted_at, last_state, flags, reason, node, restart_count,"
        " observed_at, ended_at",
        "jobs",
    ),
    "v_job_states": ("id, intent_id, job_id, state, flags, reason, node, restart_count, at", "job_states"),
    "v_holds": ("intent_id, restart_count, job_id, node, gpus, started_at, ended_at, reason", "holds"),
    "v_cluster_samples": (f"id, idle, harvested, others, reserved, unusable, pending_others, at, {_DAY}", "cluster_samples"),
    "v_decisions": ("id, policy, action, subject, reason, inputs, at", "decisions"),
    "v_events": ("id, kind, run_id, subject, reason, detail, at", "events"),
    # SQL has no clock that both databases spell alike, and of a copy of a ledger one asks what was so then: "now" is the last commit.
    "v_now": ("max(committed_at) AS unix_s", "generations"),
}  # fmt: skip

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


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    for view, (columns, table) in VIEWS.items():
        op.execute(f"CREATE VIEW {view} AS SELECT {columns} FROM {table}")
    op.execute(_DAYS[dialect])
    if dialect == "postgresql":
        for statement in (_INT32, _FLOAT32, _TOKENS):
            op.get_bind().exec_driver_sql(statement)  # as it is: its colons and percent signs name no parameter


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP VIEW v_sample_tokens")
        op.execute("DROP FUNCTION ledger_float32(bytea)")
        op.execute("DROP FUNCTION ledger_int32(bytea)")
    for view in ("v_days", *VIEWS):
        op.execute(f"DROP VIEW {view}")
