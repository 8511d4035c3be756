"""Who waited while we held GPUs, training jobs' own GPUs, failed nodes, experts of tokens, agents' episodes, clusters, times for people,
how far trainer and engine were apart at each token.

Every view gets, for each of its times in Unix seconds, a column of the same name and `_utc` ('2026-09-21 14:13:29', cut to the
second). They come last, so that PostgreSQL puts each view in its place and the grants stay; SQLite has no grants.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002_waits_costs_nodes"
down_revision = "0001_first"
branch_labels = None
depends_on = None

INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TYPES: dict[str, Any] = {"int": INT, "text": sa.Text(), "time": sa.Double(), "bytes": sa.LargeBinary()}

# As in 0001: each line is "type name name ..."; "?" after a type allows null. Each table's `id` is counted by the database.
TABLES: dict[str, tuple[str, ...]] = {
    "other_users_waits": (
        "int job_id",
        "text user_name partition",
        "int gpus",
        "time submitted_at eligible_at seen_at",
        "time? started_at ended_at",
        "text outcome",
        "int harvested_gpus",
        "time harvested_gpu_s",
    ),
    "training_jobs": (
        "int run_id job_id",
        "text user_name account",
        "int nodes gpus",
        "time started_at",
        "time? ended_at",
    ),
    "engine_deaths": (
        "text node",
        "int run_id",
        "text intent_id",
        "int job_id restart_count",
        "int? exit_code",
        "text reason",
        "time lived_s at",
    ),
    "node_quarantines": ("text node reason", "time at until_at", "time? released_at"),
    "token_differences": ("int sample_id step attempt n_tokens", "time mean", "bytes differences"),
}
# The keys of these are the core's: no counted id.
KEYED: dict[str, tuple[str, tuple[str, ...]]] = {
    "episodes": (
        "episode_id",
        ("int run_id", "text name state reason", "time begun_at", "time? ended_at", "text worker"),
    ),
    "turns": (
        "group_id",
        (
            "int episode_id run_id number",
            "bytes request content",
            "time begun_at",
            "int parent_id prefix_len prompt_tokens",
            "bytes prompt_sha256",
        ),
    ),
    "turn_samples": ("sample_id", ("bytes sha256",)),
    "tool_calls": (
        "call_id",
        (
            "int episode_id run_id",
            "text call tool",
            "bytes asker",
            "bytes? answer",
            "time asked_at",
            "time? answered_at",
        ),
    ),
}
INDEXES: dict[str, tuple[str, str]] = {
    "ix_other_users_waits_job": ("other_users_waits", "job_id"),
    "ix_other_users_waits_ended": ("other_users_waits", "ended_at"),
    "ix_training_jobs_run": ("training_jobs", "run_id job_id"),
    "ix_engine_deaths_node": ("engine_deaths", "node"),
    "ix_node_quarantines_node": ("node_quarantines", "node"),
    "ix_episodes_run": ("episodes", "run_id state"),
    "ix_turns_episode": ("turns", "episode_id"),
    "ix_tool_calls_episode": ("tool_calls", "episode_id"),
    "ix_token_differences_sample": ("token_differences", "sample_id"),
}

# What Slurm of one cluster showed, or what was decided from its queue: "" is the daemon's own.
CLUSTERED = (
    "jobs",
    "workers",
    "cluster_polls",
    "other_users_waits",
    "decisions",
    "engine_deaths",
    "node_quarantines",
)

# Views of 0001 as they are: (columns, table, times). A revision never reads another one's text.
_REASON = "CASE WHEN state = 'masked' AND reason <> '' THEN 'hidden (a verifier may quote the completion)' ELSE reason END AS reason"
_DAY = "(CAST(at AS bigint) - CASE WHEN CAST(at AS bigint) > at THEN 1 ELSE 0 END) / 86400 AS day"
# `continues`: where the prompt leaves its parent: at the end of what that said, within it, within its prompt; or it has no parent.
_EPISODE_TURNS = (
    "SELECT e.episode_id, e.run_id, e.name AS episode, u.number, u.group_id, s.sample_id, s.sample_index, u.parent_id,"
    " pu.number AS parent_number,"
    " CASE WHEN u.parent_id = 0 THEN 'nothing' WHEN u.prefix_len = pu.prompt_tokens + p.accepted_len THEN 'completion'"
    " WHEN u.prefix_len > pu.prompt_tokens THEN 'part' ELSE 'prompt' END AS continues,"
    " u.prefix_len, u.prompt_tokens, u.prompt_tokens - u.prefix_len AS added_tokens, s.accepted_len AS completion_tokens,"
    " s.state, s.finish, g.version, s.epoch AS leases, s.moves, s.regenerated,"
    " CASE WHEN u.prefix_len > pu.prompt_tokens THEN u.begun_at - p.finished_at END AS between_s,"
    " l.granted_at - u.begun_at AS queue_s, s.finished_at - l.granted_at AS model_s,"
    " u.begun_at, l.granted_at AS leased_at, s.finished_at"
    " FROM turns u"
    " JOIN episodes e ON e.episode_id = u.episode_id"
    " JOIN groups g ON g.group_id = u.group_id"
    " JOIN samples s ON s.group_id = u.group_id"
    " LEFT JOIN leases l ON l.sample_id = s.sample_id AND l.epoch = 1"
    " LEFT JOIN samples p ON p.sample_id = u.parent_id"
    " LEFT JOIN turns pu ON pu.group_id = p.group_id"
)
VIEWS: dict[str, tuple[str, str, str]] = {
    "v_generations": (
        "generation, timeline, host, pid, code_version, started_at, committed_at, batch, superseded_at",
        "generations",
        "started_at committed_at superseded_at",
    ),
    "v_runs": (
        "run_id, name, owner_key, COALESCE((SELECT e.reason FROM events e WHERE e.kind = 'owner_enrolled' AND e.subject = owner_key"
        " ORDER BY e.id DESC LIMIT 1), owner_key) AS owner,"
        " seed, tokenizer, created_at, state, reason, ended_at, attempt, resume_step, last_step, last_version,"
        " purged_at",
        "runs",
        "created_at ended_at purged_at",
    ),
    "v_attempts": ("run_id, attempt, host, job_id, resume_step, started_at", "attempts", "started_at"),
    "v_weight_versions": (
        "run_id, version, step, attempt, root, nbytes, published_at",
        "weight_versions",
        "published_at",
    ),
    "v_steps": (
        "id, run_id, purpose, step, attempt, version, metrics, committed_at, rewound_by",
        "steps",
        "committed_at",
    ),
    "v_checkpoints": (
        "id, run_id, step, version, root, path, recorded_at, rewound_by, kept",
        "checkpoints",
        "recorded_at",
    ),
    "v_groups": (
        "group_id, run_id, purpose, step, prompt_index, retry, created_version, version,"
        " COALESCE((SELECT u.prompt_tokens FROM turns u WHERE u.group_id = groups.group_id), purged_prompt_tokens,"
        " length(prompt) / 4) AS prompt_tokens,"
        " length(prompt) AS prompt_bytes, n,"
        " first_sample_id, sampling, created_at, delivered_attempt, delivered_at",
        "groups",
        "created_at delivered_at",
    ),
    "v_samples": (
        f"sample_id, group_id, run_id, sample_index, state, {_REASON}, finish, accepted_len, epoch, moves, worker_id, regenerated,"
        " reward, advantage, ended_step, ended_attempt, finished_at, ended_at, contents, reward_version",
        "samples",
        "finished_at ended_at",
    ),
    "v_sample_ends": (
        f"id, sample_id, state, {_REASON}, step, attempt, reward, advantage, reward_version, at",
        "sample_ends",
        "at",
    ),
    "v_leases": (
        "sample_id, epoch, worker_id, version, start_len, end_len, regenerated, reason, granted_at, ended_at",
        "leases",
        "granted_at ended_at",
    ),
    "v_chunks": (
        "id, sample_id, epoch, start_len, n_tokens, version, worker_id, at, length(tokens) AS token_bytes,"
        " length(logprobs) AS logprob_bytes, length(raw_logprobs) AS raw_logprob_bytes",
        "chunks",
        "at",
    ),
    "v_workers": (
        "worker_id, run_id, kind, intent_id, incarnation, job_id, node, gpus, engine, slot, joined_at, left_at, reason, notice, samples,"
        " salvaged, regenerated, cluster, CASE WHEN cluster = '' THEN node ELSE cluster || '/' || node END AS place",
        "workers",
        "joined_at left_at",
    ),
    "v_jobs": (
        "intent_id, run_id, partition, gpus, intended_at, job_id, submitted_at, last_state, flags, reason, node, restart_count,"
        " observed_at, ended_at, pinned, nodes, cluster, kind",
        "jobs",
        "intended_at submitted_at observed_at ended_at",
    ),
    "v_job_states": (
        "id, intent_id, job_id, state, flags, reason, node, restart_count, at",
        "job_states",
        "at",
    ),
    "v_gpu_allocations": (
        "intent_id, restart_count, job_id, node, gpus, started_at, ended_at, reason",
        "gpu_allocations",
        "started_at ended_at",
    ),
    "v_cluster_polls": (
        f"id, gpus_idle, gpus_harvested, gpus_other_users, gpus_reserved, gpus_unusable, jobs_pending_other_users, at, {_DAY}, cluster",
        "cluster_polls",
        "at",
    ),
    "v_decisions": ("id, policy, action, subject, reason, inputs, at, code, cluster", "decisions", "at"),
    "v_events": ("id, kind, run_id, subject, reason, detail, at", "events", "at"),
    "v_now": ("max(committed_at) AS unix_s", "generations", "max(committed_at)=utc"),
    # New ones.
    "v_other_users_waits": (
        "id, job_id, user_name, partition, gpus, submitted_at, eligible_at, seen_at, started_at, ended_at, outcome, harvested_gpus,"
        " harvested_gpu_s, cluster",
        "other_users_waits",
        "submitted_at eligible_at seen_at started_at ended_at",
    ),
    "v_training_jobs": (
        "id, run_id, job_id, user_name, account, nodes, gpus, started_at, ended_at",
        "training_jobs",
        "started_at ended_at",
    ),
    "v_engine_deaths": (
        "id, node, run_id, intent_id, job_id, restart_count, exit_code, reason, lived_s, at, cluster",
        "engine_deaths",
        "at",
    ),
    "v_node_quarantines": (
        "id, node, reason, at, until_at, released_at, cluster",
        "node_quarantines",
        "at until_at released_at",
    ),
    "v_token_differences": (
        "id, sample_id, step, attempt, n_tokens, mean, length(differences) AS difference_bytes",
        "token_differences",
        "",
    ),
    "v_episodes": (
        "episode_id, run_id, name, state, reason, begun_at, ended_at, worker",
        "episodes",
        "begun_at ended_at",
    ),
    "v_turns": (
        "group_id, episode_id, run_id, number, begun_at, parent_id, prefix_len, prompt_tokens",
        "turns",
        "begun_at",
    ),
    "v_tool_calls": (
        "call_id, episode_id, run_id, call, tool,"
        " CASE WHEN answered_at IS NOT NULL THEN 'answered' WHEN EXISTS (SELECT 1 FROM episodes e WHERE e.episode_id ="
        " tool_calls.episode_id AND e.state = 'open') THEN 'asked' ELSE 'unknown' END AS state,"
        " length(answer) AS answer_bytes, asked_at, answered_at",
        "tool_calls",
        "asked_at answered_at",
    ),
    # One row a sample of a turn. Seconds count from when the turn was asked for; of an open sample the later ones are null.
    "v_episode_turns": (
        "episode_id, run_id, episode, number, group_id, sample_id, sample_index, parent_id, parent_number, continues, prefix_len,"
        " prompt_tokens, added_tokens, completion_tokens, state, finish, version, leases, moves, regenerated, between_s, queue_s, model_s,"
        " begun_at, leased_at, finished_at",
        f"({_EPISODE_TURNS}) t",
        "begun_at leased_at finished_at",
    ),
}

# A turn's prompt begins with its parent's prompt and completion, for `prefix_len` tokens, and so on: each step of the walk has what one
# ancestor adds to what is still missing (`upto` tokens).
_TOKENS = """
CREATE OR REPLACE VIEW v_sample_tokens AS
SELECT s.sample_id, s.run_id, s.group_id, s.sample_index, s.state, s.contents, s.accepted_len,
       ledger_int32(CASE WHEN g.purpose = 'turn' THEN b.before || g.prompt ELSE g.prompt END) AS prompt,
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
CROSS JOIN LATERAL (
    WITH RECURSIVE walk AS (
        SELECT 0 AS step, '\\x'::bytea AS piece, u.parent_id, u.prefix_len AS upto
        FROM turns u
        WHERE u.group_id = s.group_id
        UNION ALL
        SELECT w.step + 1,
               substring(o.added FROM 1 FOR CAST(4 * greatest(least(w.upto, o.prompt_tokens) - o.prefix_len, 0) AS integer))
               || substring(t.tokens FROM 1 FOR CAST(4 * greatest(w.upto - o.prompt_tokens, 0) AS integer)),
               o.parent_id, least(w.upto, o.prefix_len)
        FROM walk w
        JOIN LATERAL (
            SELECT q.prompt AS added, u.prompt_tokens, u.prefix_len, u.parent_id
            FROM samples p
            JOIN turns u ON u.group_id = p.group_id
            JOIN groups q ON q.group_id = p.group_id
            WHERE p.sample_id = w.parent_id
        ) o ON true
        CROSS JOIN LATERAL (
            SELECT coalesce(string_agg(k.tokens, '\\x'::bytea ORDER BY k.start_len), '\\x') AS tokens
            FROM chunks k
            WHERE k.sample_id = w.parent_id AND w.upto > o.prompt_tokens
        ) t
        WHERE w.upto > 0
    )
    SELECT coalesce(string_agg(piece, '\\x'::bytea ORDER BY step DESC), '\\x') AS before FROM walk
) b
"""

# Both cut to the second: one database would round, the other cut. Beyond year 9999 neither has a spelling.
_UTC = {
    "sqlite": "CASE WHEN {at} >= 0 AND {at} < 253402300800 THEN strftime('%Y-%m-%d %H:%M:%S', CAST({at} AS integer), 'unixepoch') END",
    "postgresql": "CASE WHEN {at} >= 0 AND {at} < 253402300800"
    " THEN to_char(to_timestamp(floor({at})) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') END",
}


def _columns(line: str) -> list[sa.Column[Any]]:
    kind, *names = line.split()
    return [sa.Column(name, _TYPES[kind.rstrip("?")], nullable=kind.endswith("?")) for name in names]


def _readable(times: str, dialect: str) -> str:
    shown = []
    for time in times.split():
        at, _, name = time.partition("=")
        shown.append(f", {_UTC[dialect].format(at=at)} AS {name or f'{at}_utc'}")
    return "".join(shown)


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    for table, lines in TABLES.items():
        counted = sa.Column("id", INT, primary_key=True, autoincrement=True)
        op.create_table(table, counted, *(column for line in lines for column in _columns(line)))
    for table, (key, lines) in KEYED.items():
        named = sa.Column(key, INT, primary_key=True, autoincrement=False)
        op.create_table(table, named, *(column for line in lines for column in _columns(line)))
    for index, (table, names) in INDEXES.items():
        op.create_index(index, table, names.split())
    op.add_column("jobs", sa.Column("nodes", INT, nullable=False, server_default="1"))
    for table in CLUSTERED:
        op.add_column(table, sa.Column("cluster", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("jobs", sa.Column("kind", sa.Text(), nullable=False, server_default="engine"))
    op.add_column("chunks", sa.Column("routing", sa.LargeBinary(), nullable=True))
    for view, (columns, table, times) in VIEWS.items():
        if dialect == "sqlite":
            op.execute(f"DROP VIEW IF EXISTS {view}")
        create = "CREATE VIEW" if dialect == "sqlite" else "CREATE OR REPLACE VIEW"
        # As it is: its colons and percent signs name no parameter.
        op.get_bind().exec_driver_sql(
            f"{create} {view} AS SELECT {columns}{_readable(times, dialect)} FROM {table}"
        )
    if dialect == "postgresql":
        op.get_bind().exec_driver_sql(_TOKENS)
