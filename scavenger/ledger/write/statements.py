"""How each record becomes SQL: `KINDS`, a table from record kind to statements. Pure: builds statements and parameters, runs none.

Three sets of each kind say which records of another kind must be written before its own (`batches.arrange` keeps to them):

    creates   rows it inserts. They are new, so an insert may always move ahead.
    uses      rows that must exist. It stays behind every kind that creates such rows.
    sets      labels `table.what` of state whose last writer wins. A label may stand for several columns (`steps.rewound`: for
              `steps.rewound_by` and the fall of `runs.last_step`). Two kinds that share a label keep their order.

Columns that only grow (`accepted_len`) or add up (`regenerated`, `moves`) are in no set: their updates commute.

A statement is written once, over one parameter row. A parameter has the name of the record's field, after `p_`. The SQL of every kind
is in `sql/ledger/writes.sql`, which `sql_page` generates. `SampleFinished` has one statement:

    UPDATE samples
    SET state='complete', finish=:p_finish,
        accepted_len=CASE WHEN (samples.accepted_len < :p_length) THEN :p_length
                          ELSE samples.accepted_len END,
        finished_at=:p_at
    WHERE samples.sample_id = :p_sample_id

For a few records it is run row by row; for many, `batch_sql` makes one statement over all rows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Table, bindparam

from scavenger.ledger import records as r
from scavenger.ledger import schema as t
from scavenger.ledger.records import Record
from scavenger.ledger.write.batch_sql import StatementShape

Row = dict[str, Any]
Rows = Callable[[Sequence[Any]], Iterable[Row]]


def clean(value: Any) -> Any:
    """Text without NUL, which PostgreSQL's text cannot hold: another process's text must not be able to stop the ledger."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def parameters(record: Record) -> Row:
    """A record's fields as bind parameters; the prefix keeps them apart from the column names that SQLAlchemy binds itself."""
    return {f"p_{name}": clean(getattr(record, name)) for name in record.__struct_fields__}


def each(records: Sequence[Record]) -> Iterator[Row]:
    """One parameter row a record."""
    return map(parameters, records)


def new_samples(records: Sequence[r.GroupCreated]) -> Iterator[Row]:
    for group in records:
        for index in range(group.n):
            yield {
                "p_sample_id": group.first_sample_id + index,
                "p_group_id": group.group_id,
                "p_run_id": group.run_id,
                "p_index": index,
            }


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement and how a batch of records becomes its parameter rows. `must_match`: each row must change exactly one.

    `shape` says the same for many rows at once (`batch_sql`), where the statement has such a form.
    """

    sql: sa.Executable
    rows: Rows
    must_match: bool = False
    shape: StatementShape | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """What the writer does with one kind of record. The insert of chunks is `batches.append_chunks`."""

    statements: tuple[Statement, ...]
    creates: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    sets: frozenset[str] = frozenset()


# ---------------------------------------------------------------- builders


def _p(name: str) -> sa.BindParameter[Any]:
    return bindparam(f"p_{name}")


def _insert(table: Table, rows: Rows = each, /, **columns: Any) -> Statement:
    """`columns` are constants, or names of fields where a string starts with ':'."""
    values = _values(table, columns)
    return Statement(
        sa.insert(table).values(values).inline(), rows, shape=StatementShape(table, (), tuple(values.items()))
    )


def _values(table: Table, columns: dict[str, Any]) -> Row:
    return {name: _value(table.c[name], value) for name, value in columns.items()}


def _value(column: sa.Column[Any], value: Any) -> Any:
    if isinstance(value, str) and value.startswith(":"):
        return bindparam(f"p_{value[1:]}", type_=column.type)
    return value


def _fields(names: str) -> dict[str, Any]:
    """Columns with the names of the record's fields."""
    return {name: f":{name}" for name in names.split()}


def _update(
    table: Table, keys: str, rows: Rows = each, /, *, must_match: bool = True, **columns: Any
) -> Statement:
    """Update the row whose `keys` (columns with the names of fields) match. `columns` as in `_insert`."""
    where = [table.c[key] == _p(key) for key in keys.split()]
    values = _values(table, columns)
    shape = StatementShape(table, tuple(keys.split()), tuple(values.items()))
    return Statement(sa.update(table).where(*where).values(values), rows, must_match, shape)


def _end_open(table: Table, keys: str, /, **columns: Any) -> Statement:
    """Update the rows whose `keys` match and that have no end yet: the last of `columns` is what an end is told by."""
    values = _values(table, columns)
    opened = table.c[list(columns)[-1]].is_(None)
    where = [table.c[key] == _p(key) for key in keys.split()]
    return Statement(sa.update(table).where(*where, opened).values(values), each)


def _at_least(column: sa.Column[Any], field: str) -> sa.Case[Any]:
    """The greater of a column and a field. (`max(a, b)` is SQLite's spelling only, `greatest` PostgreSQL's.)"""
    value = bindparam(f"p_{field}", type_=column.type)
    return sa.case((column < value, value), else_=column)


def _next(field: str) -> sa.ColumnElement[Any]:
    """One more than a field."""
    return bindparam(f"p_{field}", type_=t.Int) + 1


def _kind(*statements: Statement, creates: str = "", uses: str = "", sets: str = "") -> Kind:
    return Kind(statements, frozenset(creates.split()), frozenset(uses.split()), frozenset(sets.split()))


# ---------------------------------------------------------------- the table

_END = "sample_id state reason step attempt reward advantage at reward_version"
_JOB_STATE = "state flags reason node restart_count"

KINDS: dict[type[Record], Kind] = {
    r.RunCreated: _kind(
        _insert(
            t.runs,
            **_fields("run_id name owner_key seed config engine tokenizer"),
            created_at=":at",
            state="active",
            reason="",
            attempt=0,
            resume_step=0,
            last_step=0,
            last_version=0,
        ),
        creates="runs",
    ),
    # A run that had ended and is opened again goes on.
    r.AttemptGranted: _kind(
        _insert(
            t.attempts, **_fields("run_id attempt host job_id resume_step config engine"), started_at=":at"
        ),
        _update(t.runs, "run_id", **_fields("attempt resume_step"), state="active", reason="", ended_at=None),
        creates="attempts",
        uses="runs",
        sets="runs.attempt runs.state",
    ),
    r.RunEnded: _kind(
        _update(t.runs, "run_id", **_fields("state reason"), ended_at=":at"), uses="runs", sets="runs.state"
    ),
    r.VersionPublished: _kind(
        _insert(
            t.weight_versions,
            published_at=":at",
            **_fields("run_id version step attempt root manifest nbytes"),
        ),
        _update(t.runs, "run_id", last_version=_at_least(t.runs.c.last_version, "version")),
        creates="weight_versions",
        uses="runs",
    ),
    r.StepCommitted: _kind(
        _insert(t.steps, **_fields("run_id purpose step attempt version metrics"), committed_at=":at"),
        _update(
            t.runs,
            "run_id",
            last_step=sa.case(
                (_p("purpose") == "train", _at_least(t.runs.c.last_step, "step")), else_=t.runs.c.last_step
            ),
        ),
        creates="steps",
        uses="runs",
        sets="steps.rewound",
    ),
    r.StepsRewound: _kind(
        *(
            Statement(
                sa.update(table)
                .where(
                    table.c.run_id == _p("run_id"), table.c.step > _p("to_step"), table.c.rewound_by.is_(None)
                )
                .values(rewound_by=bindparam("p_attempt", type_=t.Int)),
                each,
            )
            for table in (t.steps, t.checkpoints)
        ),
        _update(t.runs, "run_id", last_step=":to_step"),
        uses="runs",
        sets="steps.rewound checkpoints.rewound",
    ),
    r.CheckpointRecorded: _kind(
        _insert(t.checkpoints, **_fields("run_id step version root path kept"), recorded_at=":at"),
        creates="checkpoints",
        sets="checkpoints.rewound",
    ),
    r.GroupCreated: _kind(
        _insert(
            t.groups,
            **_fields(
                "group_id run_id purpose step prompt_index retry version prompt n first_sample_id sampling meta"
            ),
            created_version=":version",
            created_at=":at",
            delivered_attempt=0,
        ),
        _insert(
            t.samples,
            new_samples,
            **_fields("sample_id group_id run_id"),
            sample_index=":index",
            state="open",
            reason="",
            finish="",
            reward_version="",
            accepted_len=0,
            epoch=0,
            moves=0,
            worker_id=0,
            regenerated=0,
            ended_step=0,
            ended_attempt=0,
        ),
        creates="groups samples",
    ),
    r.GroupAdopted: _kind(
        _update(t.groups, "group_id", version=":version"), uses="groups", sets="groups.version"
    ),
    r.GroupDeferred: _kind(_update(t.groups, "group_id", step=":step"), uses="groups", sets="groups.step"),
    r.GroupDelivered: _kind(
        _update(t.groups, "group_id", delivered_attempt=":attempt", delivered_at=":at"),
        uses="groups",
        sets="groups.delivered",
    ),
    r.LeaseGranted: _kind(
        _insert(
            t.leases,
            **_fields("sample_id epoch worker_id version"),
            start_len=":offset",
            end_len=":offset",
            regenerated=0,
            reason="",
            granted_at=":at",
        ),
        _update(
            t.samples,
            "sample_id",
            **_fields("epoch worker_id"),
            moves=t.samples.c.moves + sa.case((_p("offset") > 0, 1), else_=0),
        ),
        creates="leases",
        uses="samples",
        sets="samples.epoch",
    ),
    r.LeaseEnded: _kind(
        _update(
            t.leases, "sample_id epoch", **_fields("reason regenerated"), end_len=":length", ended_at=":at"
        ),
        _update(
            t.samples,
            "sample_id",
            accepted_len=_at_least(t.samples.c.accepted_len, "length"),
            regenerated=t.samples.c.regenerated + bindparam("p_regenerated", type_=t.Int),
        ),
        uses="leases samples",
    ),
    # New rows first: a sample may move twice in one batch.
    r.LeaseMoved: _kind(
        _insert(
            t.leases,
            **_fields("sample_id worker_id version"),
            epoch=_next("epoch"),
            start_len=":length",
            end_len=":length",
            regenerated=0,
            reason="",
            granted_at=":at",
        ),
        _update(
            t.leases, "sample_id epoch", **_fields("reason regenerated"), end_len=":length", ended_at=":at"
        ),
        _update(
            t.samples,
            "sample_id",
            worker_id=":worker_id",
            epoch=_next("epoch"),
            moves=t.samples.c.moves + sa.case((_p("length") > 0, 1), else_=0),
            accepted_len=_at_least(t.samples.c.accepted_len, "length"),
            regenerated=t.samples.c.regenerated + bindparam("p_regenerated", type_=t.Int),
        ),
        creates="leases",
        uses="leases samples",
        sets="samples.epoch",
    ),
    # Over `batches.SampleLength`: one update a sample, however many chunks it has in the batch.
    r.ChunkAccepted: _kind(
        _update(t.samples, "sample_id", accepted_len=_at_least(t.samples.c.accepted_len, "length")),
        creates="chunks",
        uses="samples",
    ),
    # Its statements depend on what the chunks hold: `compaction` runs them. No attempt may be granted in between, no chunk follow.
    r.ContentsReduced: _kind(
        uses="samples chunks leases token_differences", sets="samples.state runs.attempt"
    ),
    r.SampleFinished: _kind(
        _update(
            t.samples,
            "sample_id",
            state="complete",
            finish=":finish",
            accepted_len=_at_least(t.samples.c.accepted_len, "length"),
            finished_at=":at",
        ),
        uses="samples",
        sets="samples.state",
    ),
    r.SampleEnded: _kind(
        _insert(t.sample_ends, **_fields(_END)),
        _update(
            t.samples,
            "sample_id",
            **_fields("state reason reward advantage reward_version"),
            ended_step=":step",
            ended_attempt=":attempt",
            ended_at=":at",
        ),
        creates="sample_ends",
        uses="samples",
        sets="samples.state",
    ),
    r.DifferencesRecorded: _kind(
        _insert(t.token_differences, **_fields("sample_id step attempt n_tokens mean differences")),
        creates="token_differences",
        uses="samples",
    ),
    r.SampleReopened: _kind(
        _insert(
            t.sample_ends,
            **_fields("sample_id attempt at"),
            state="reopened",
            reason="",
            step=0,
            reward=None,
            advantage=None,
            reward_version="",
        ),
        _update(
            t.samples,
            "sample_id",
            state="complete",
            reason="",
            ended_step=0,
            ended_attempt=0,
            ended_at=None,
            advantage=None,
        ),
        creates="sample_ends",
        uses="samples",
        sets="samples.state",
    ),
    r.EpisodeBegun: _kind(
        _insert(
            t.episodes,
            **_fields("episode_id run_id name"),
            state="open",
            reason="",
            begun_at=":at",
            worker="",
            spent_turns=0,
            spent_tokens=0,
        ),
        creates="episodes",
    ),
    r.EpisodeEnded: _kind(
        _update(t.episodes, "episode_id", **_fields("state reason worker"), ended_at=":at"), uses="episodes"
    ),
    r.EpisodeSpent: _kind(
        _update(t.episodes, "episode_id", spent_turns=":turns", spent_tokens=":tokens"), uses="episodes"
    ),
    r.TurnBegun: _kind(
        _insert(
            t.turns,
            **_fields(
                "group_id episode_id run_id number request content parent_id prefix_len prompt_tokens prompt_sha256"
            ),
            begun_at=":at",
        ),
        creates="turns",
    ),
    r.TurnRewarded: _kind(_update(t.turns, "group_id", reward=":reward"), uses="turns"),
    r.TurnSampleFinished: _kind(
        _insert(t.turn_samples, **_fields("sample_id sha256")), creates="turn_samples"
    ),
    r.Delivered: _kind(
        _insert(
            t.deliveries,
            **_fields(
                "delivery_id run_id source_run_id episode_id step prompt_index episode_index reward version state reason"
            ),
            group_delivery_id=":group",
            episode_rows=":rows",
            ended_step=0,
            ended_attempt=0,
            advantage=None,
            delivered_at=":at",
        ),
        creates="deliveries",
    ),
    r.TurnDelivered: _kind(
        _insert(t.delivered_turns, **_fields("group_id run_id delivery_id"), advantage=None),
        creates="delivered_turns",
    ),
    r.DeliveredTurnTaken: _kind(
        _update(t.delivered_turns, "group_id", advantage=":advantage"), uses="delivered_turns"
    ),
    r.DeliveryTaken: _kind(
        _update(
            t.deliveries,
            "delivery_id",
            **_fields("reason advantage"),
            state=":outcome",
            ended_step=":step",
            ended_attempt=":attempt",
            ended_at=":at",
        ),
        uses="deliveries",
        sets="deliveries.state",
    ),
    r.DeliveryReopened: _kind(
        _update(
            t.deliveries,
            "delivery_id",
            state="due",
            reason="",
            ended_step=0,
            ended_attempt=0,
            advantage=None,
            ended_at=None,
        ),
        uses="deliveries",
        sets="deliveries.state",
    ),
    r.DeliveryEnded: _kind(
        _update(t.deliveries, "delivery_id", **_fields("state reason"), ended_at=":at"),
        uses="deliveries",
        sets="deliveries.state",
    ),
    r.ToolAsked: _kind(
        _insert(
            t.tool_calls, **_fields("call_id episode_id run_id call tool asker"), answer=None, asked_at=":at"
        ),
        creates="tool_calls",
    ),
    r.ToolAnswered: _kind(
        _update(t.tool_calls, "call_id", **_fields("answer"), answered_at=":at"), uses="tool_calls"
    ),
    r.WorkerJoined: _kind(
        _insert(
            t.workers,
            **_fields(
                "worker_id run_id kind intent_id session incarnation job_id node gpus engine slot cluster"
            ),
            joined_at=":at",
            reason="",
            samples=0,
            salvaged=0,
            regenerated=0,
        ),
        creates="workers",
    ),
    r.WorkerLeft: _kind(
        _update(
            t.workers, "worker_id", **_fields("reason notice samples salvaged regenerated"), left_at=":at"
        ),
        uses="workers",
    ),
    r.JobIntended: _kind(
        _insert(
            t.jobs,
            **_fields("intent_id run_id partition gpus worker_key pinned nodes cluster kind"),
            intended_at=":at",
            job_id=0,
            last_state="",
            flags="",
            reason="",
            node="",
            restart_count=0,
        ),
        creates="jobs",
    ),
    # Jobs and allocations are what Slurm reports, perhaps of intents that a restored ledger does not have:
    # a report without its row is kept in the history and stops nothing.
    r.JobChangedHands: _kind(
        _insert(t.job_runs, intent_id=":intent_id", run_id=":run_before", since_at=":since", until_at=":at"),
        _update(t.jobs, "intent_id", must_match=False, **_fields("run_id worker_key")),
        creates="job_runs",
        uses="jobs",
        sets="jobs.run",
    ),
    r.JobSubmitted: _kind(
        _update(t.jobs, "intent_id", must_match=False, job_id=":job_id", submitted_at=":at"),
        uses="jobs",
        sets="jobs.job_id",
    ),
    r.JobObserved: _kind(
        _insert(t.job_states, **_fields(f"intent_id job_id at {_JOB_STATE}")),
        _update(
            t.jobs,
            "intent_id",
            must_match=False,
            job_id=":job_id",
            last_state=":state",
            observed_at=":at",
            **_fields("flags reason node restart_count"),
        ),
        creates="job_states",
        uses="jobs",
        sets="jobs.job_id jobs.state",
    ),
    r.JobEnded: _kind(
        _update(t.jobs, "intent_id", must_match=False, last_state=":state", reason=":reason", ended_at=":at"),
        uses="jobs",
        sets="jobs.state",
    ),
    r.AllocationStarted: _kind(
        _insert(
            t.gpu_allocations,
            **_fields("intent_id restart_count job_id node gpus"),
            started_at=":at",
            reason="",
        ),
        creates="gpu_allocations",
    ),
    r.AllocationEnded: _kind(
        _update(
            t.gpu_allocations, "intent_id restart_count", must_match=False, reason=":reason", ended_at=":at"
        ),
        uses="gpu_allocations",
        sets="gpu_allocations.end",
    ),
    r.AllocationCorrected: _kind(
        _update(
            t.gpu_allocations,
            "intent_id restart_count",
            must_match=False,
            **_fields("node gpus started_at ended_at reason"),
        ),
        uses="gpu_allocations",
        sets="gpu_allocations.end",
    ),
    r.ClusterPolled: _kind(
        _insert(
            t.cluster_polls,
            **_fields(
                "gpus_idle gpus_harvested gpus_other_users gpus_reserved gpus_unusable jobs_pending_other_users at cluster"
            ),
        ),
        creates="cluster_polls",
    ),
    # Others' jobs are what Slurm reports: an end without its row is kept nowhere and stops nothing.
    r.OtherUserWaits: _kind(
        _insert(
            t.other_users_waits,
            **_fields("job_id user_name partition gpus submitted_at eligible_at harvested_gpus cluster"),
            seen_at=":at",
            outcome="",
            harvested_gpu_s=0.0,
        ),
        creates="other_users_waits",
        sets="other_users_waits.end",
    ),
    r.OtherUserWaited: _kind(
        _end_open(
            t.other_users_waits,
            "job_id submitted_at cluster",
            **_fields("outcome started_at harvested_gpus harvested_gpu_s"),
            ended_at=":at",
        ),
        uses="other_users_waits",
        sets="other_users_waits.end",
    ),
    r.TrainingJobStarted: _kind(
        _insert(t.training_jobs, **_fields("run_id job_id user_name account nodes gpus"), started_at=":at"),
        creates="training_jobs",
        sets="training_jobs.end",
    ),
    r.TrainingJobEnded: _kind(
        _end_open(t.training_jobs, "run_id job_id", ended_at=":at"),
        uses="training_jobs",
        sets="training_jobs.end",
    ),
    r.EngineDied: _kind(
        _insert(
            t.engine_deaths,
            **_fields("node run_id intent_id job_id restart_count exit_code reason lived_s at cluster"),
        ),
        creates="engine_deaths",
    ),
    r.NodeQuarantined: _kind(
        _insert(t.node_quarantines, **_fields("node reason until_at at cluster")),
        creates="node_quarantines",
        sets="node_quarantines.end",
    ),
    r.NodeReleased: _kind(
        _end_open(t.node_quarantines, "node cluster", released_at=":at"),
        uses="node_quarantines",
        sets="node_quarantines.end",
    ),
    r.Decision: _kind(
        _insert(t.decisions, **_fields("policy action subject reason inputs at code cluster")),
        creates="decisions",
    ),
    r.Event: _kind(_insert(t.events, **_fields("kind run_id subject reason detail at")), creates="events"),
    r.Heartbeat: _kind(),
}


def describe(record: Record) -> str:
    """A record in one short line, for messages: payloads by their size only."""
    fields = ((name, getattr(record, name)) for name in record.__struct_fields__)
    shown = (f"{n}=<{len(v)} bytes>" if isinstance(v, bytes) else f"{n}={str(v)[:40]!r}" for n, v in fields)
    return f"{type(record).__name__}({', '.join(shown)})"
