"""Reading the ledger: what a restarted daemon needs, and what `scavenger samples` shows.

Owns the way from rows back to records. Writes nothing and keeps no transaction open longer than one call. The daemon takes its
snapshot after `Writer.start` granted a generation: from then on no other daemon can commit.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import sqlalchemy as sa

from scavenger.errors import LedgerError, LedgerUnavailable
from scavenger.ledger import queries, store
from scavenger.ledger import records as r
from scavenger.ledger.faults import FINAL, classify, explain, overran, remedy
from scavenger.ledger.read import prompts
from scavenger.ledger.store import MAINTENANCE_S, READER_S
from scavenger.protocol.messages import MAX_PASS_RATES, unpack_logprobs, unpack_tokens
from scavenger.weights import manifest as manifests

Piece = tuple[int, bytes, bytes, bytes, bytes]  # start_len, tokens, logprobs, raw_logprobs, routing
Payload = tuple[bytes, bytes, bytes, bytes]  # tokens, logprobs, raw_logprobs, routing

#: Samples named in one statement: SQLite takes 32,766 parameters at most, and a long list is slow to parse.
_MOST_NAMED = 500
#: Remedies: of a read that took too long, and of rows that contradict each other.
_OVERRAN = f"readers are ended after {READER_S:g} s ({MAINTENANCE_S:g} s in a check), for the daemon's sake: ask for less, or export it"
_RESTORE = "run `scavenger ledger check`, and restore the last backup if it finds more"
#: `samples.contents` of a sample whose tokens are not there any more.
GONE = frozenset({"dropped", "purged"})
_GONE: Payload = (b"", b"", b"", b"")


class LeaseSpan(msgspec.Struct, frozen=True):
    """One lease of a sample: who held it, and which of the completion's tokens it brought (`start_len` up to `end_len`)."""

    epoch: int
    worker_id: int
    kind: str
    node: str
    job_id: int
    start_len: int
    end_len: int
    reason: str


class SampleRow(msgspec.Struct, frozen=True):
    """One sample for a reader. `prompt` and `tokens` are token ids; `logprobs` are under the sampling distribution."""

    sample_id: int
    group_id: int
    step: int
    prompt_index: int
    retry: int
    index: int
    state: str
    reason: str
    finish: str
    reward: float | None
    advantage: float | None
    moves: int
    regenerated: int
    accepted_len: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    contents: str  # "", or what became of the tokens: compacted | dropped | purged
    meta: str
    leases: tuple[LeaseSpan, ...]


class RunRow(msgspec.Struct, frozen=True):
    """A run as the ledger has it now. `state`: "active" | "finished" | "failed" | "stopped"."""

    run_id: int
    name: str
    seed: int
    config: str
    engine: str
    tokenizer: str
    state: str
    reason: str
    attempt: int
    resume_step: int
    last_step: int
    last_version: int
    created_at: float
    ended_at: float | None


class QueryResult(msgspec.Struct, frozen=True):
    """The result of a query: column names, and rows in the order of the columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


# ---------------------------------------------------------------- pure


def join_chunks(sample_id: int, pieces: Iterable[Piece], length: int) -> Payload:
    """Chunks of one sample, in any order, as (tokens, logprobs, raw_logprobs, routing) of `length` tokens.

    Raises `LedgerError`, naming the sample, unless each chunk begins where the one before ended and the last ends at `length`.
    """
    columns: tuple[list[bytes], list[bytes], list[bytes], list[bytes]] = ([], [], [], [])
    at = 0
    for start, *payload in sorted(pieces, key=lambda piece: piece[0]):
        if start != at:
            what = "tokens are missing" if start > at else "chunks overlap"
            raise LedgerError(
                f"sample {sample_id}: {what}: a chunk begins at {start}, the ones before end at {at}",
                _RESTORE,
            )
        if not len(payload[0]) == len(payload[1]) == len(payload[2]):
            raise LedgerError(
                f"sample {sample_id}: the chunk at {start} has not as many logprobs as tokens", _RESTORE
            )
        if len(payload[3]) % max(1, len(payload[0]) // 4):
            raise LedgerError(
                f"sample {sample_id}: the chunk at {start} has not the same routing for each token", _RESTORE
            )
        for column, data in zip(columns, payload, strict=True):
            column.append(data)
        at += len(payload[0]) // 4
    if at != length:
        raise LedgerError(f"sample {sample_id}: {at} tokens in its chunks, {length} accepted", _RESTORE)
    tokens, logprobs, raw_logprobs, routing = (b"".join(column) for column in columns)
    return tokens, logprobs, raw_logprobs, routing


def final_step(config: str, checkpoints: Sequence[tuple[int, str]]) -> int:
    """The step up to which consumption is final: that of the oldest checkpoint that is kept, -1 when there is none.

    `checkpoints`: (step, kept) of the surviving records, those of one step in the order of their time. The newest says which are kept.
    Where its trainer did not, they are the newest `checkpoint.keep` of the run's configuration (JSON), or all if that does not say either.
    """
    newest = max(range(len(checkpoints)), key=lambda i: (checkpoints[i][0], i), default=None)
    if newest is not None and checkpoints[newest][1]:
        return int(min(json.loads(checkpoints[newest][1])))
    section = json.loads(config).get("checkpoint") if config else None
    keep = section.get("keep") if isinstance(section, dict) else None
    kept = sorted({step for step, _ in checkpoints})
    if isinstance(keep, int) and keep > 0:
        kept = kept[-keep:]
    return kept[0] if kept else -1


# ---------------------------------------------------------------- reading


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    """A short read of the ledger: one connection, one moment. Raises `LedgerError` where it cannot be read, or is another release's."""
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:
            store.require_head(connection)
            yield connection
    finally:
        engine.dispose()


@contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A short transaction in which all statements see one state of the ledger."""
    with kept(engine) as read, read() as connection:
        yield connection


@contextmanager
def kept(engine: sa.Engine) -> Iterator[Callable[[], AbstractContextManager[sa.Connection]]]:
    """One connection; each call of what it gives is a short transaction as `reading` makes one, after the one before has ended."""
    with _explained(), engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="REPEATABLE READ")

        @contextmanager
        def read() -> Iterator[sa.Connection]:
            with _explained(), connection.begin():
                yield connection

        yield read


@contextmanager
def _explained() -> Iterator[None]:
    """A database's errors become this tree's."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        state = classify(error)
        why = f"the ledger cannot be read: {explain(error)}"
        if overran(error):
            raise LedgerUnavailable(why, _OVERRAN) from error
        raise (LedgerError if state in FINAL else LedgerUnavailable)(why, remedy(error, failed="")) from error


def _ask(connection: sa.Connection, query: str, /, **parameters: Any) -> Iterator[Mapping[str, Any]]:
    result = connection.execute(sa.text(queries.load(query)), parameters)
    return (dict(row) for row in result.mappings())


def _tuples(connection: sa.Connection, query: str, /, **parameters: Any) -> Iterable[Sequence[Any]]:
    return connection.execute(sa.text(queries.load(query)), parameters).all()


def rows(engine: sa.Engine, sql: str, params: Mapping[str, Any] | None = None) -> QueryResult:
    """Run one statement (`:name` marks a parameter) and fetch all of its answer. Raises `LedgerError`."""
    with reading(engine) as connection:
        result = connection.execute(sa.text(sql), dict(params or {}))
        return QueryResult(tuple(result.keys()), tuple(tuple(row) for row in result))


def read_snapshot(engine: sa.Engine) -> r.Snapshot:
    """Everything a restarted daemon needs, in one consistent view: lengths, and tokens of turns under way alone. Raises `LedgerError`."""
    with reading(engine) as connection:
        runs = _runs(connection)
        groups: list[r.OpenGroup] = []
        deliveries: list[r.DeliveryState] = []
        for run in runs:
            if run.ended:
                continue  # nothing of it is in flight; a resume reads its groups by `replay_groups`
            final = final_step(
                run.config, [(checkpoint.step, checkpoint.kept) for checkpoint in run.checkpoints]
            )
            # An attempt that resumed from an older checkpoint than those that are kept may replay from there.
            after = min(final, run.last_step)
            groups.extend(_groups(connection, run.created.run_id, after))
            due = _ask(connection, "snapshot_deliveries", run_id=run.created.run_id)
            deliveries.extend(_struct(r.DeliveryState, row) for row in due)
        workers = tuple(
            r.WorkerState(_struct(r.WorkerJoined, row, at="joined_at"))
            for row in _ask(connection, "snapshot_workers")
        )
        lives: dict[str, list[r.EngineLife]] = defaultdict(list)
        for row in _ask(connection, "snapshot_lives"):
            lives[row["intent_id"]].append(_struct(r.EngineLife, row))
        jobs = tuple(_job(row, lives[row["intent_id"]]) for row in _ask(connection, "snapshot_jobs"))
        retries = tuple(tuple(row.values()) for row in _ask(connection, "snapshot_retries"))
        waits = tuple(
            _struct(r.OtherUserWaits, row, at="seen_at") for row in _ask(connection, "snapshot_waits")
        )
        training = tuple(
            _struct(r.TrainingJobStarted, row, at="started_at")
            for row in _ask(connection, "snapshot_training_jobs")
        )
        quarantined = tuple((row["cluster"], row["node"]) for row in _ask(connection, "snapshot_quarantines"))
        episodes = tuple(_struct(r.EpisodeState, row) for row in _ask(connection, "snapshot_episodes"))
        turns = tuple(_struct(r.TurnBegun, row, at="begun_at") for row in _ask(connection, "snapshot_turns"))
        turn_samples = tuple(
            _struct(r.TurnSampleFinished, row) for row in _ask(connection, "snapshot_turn_samples")
        )
        tool_calls = tuple(_struct(r.ToolCallState, row) for row in _ask(connection, "snapshot_tool_calls"))
        groups, turn_tokens = _with_whole_prompts(connection, groups, {turn.group_id for turn in turns})
        (ids,) = _ask(connection, "next_ids")
        return r.Snapshot(
            **ids,
            runs=tuple(runs),
            groups=tuple(groups),
            workers=workers,
            jobs=jobs,
            retries=retries,
            waits=waits,
            training_jobs=training,
            quarantined=quarantined,
            episodes=episodes,
            turns=turns,
            turn_samples=turn_samples,
            tool_calls=tool_calls,
            turn_tokens=turn_tokens,
            deliveries=tuple(deliveries),
        )


def _with_whole_prompts(
    connection: sa.Connection, groups: list[r.OpenGroup], turns: set[int]
) -> tuple[list[r.OpenGroup], tuple[tuple[int, bytes], ...]]:
    """The groups, of which turns under way have their whole prompts and all other turns none; and the tokens that those have so far."""
    under_way = [
        group.created.group_id
        for group in groups
        if group.created.group_id in turns and any(sample.state == "open" for sample in group.samples)
    ]
    whole = prompts.whole_prompts(connection, under_way)
    begun = [
        sample.sample_id
        for group in groups
        if group.created.group_id in whole
        for sample in group.samples
        if sample.state == "open" and sample.length
    ]
    replace = msgspec.structs.replace
    found = [
        replace(group, created=replace(group.created, prompt=whole.get(group.created.group_id, b"")))
        if group.created.purpose == "turn"
        else group
        for group in groups
    ]
    return found, tuple(sorted(prompts.tokens_of(connection, begun).items()))


def replay_groups(engine: sa.Engine, run_id: int, after_step: int) -> tuple[r.OpenGroup, ...]:
    """A run's groups that are not final for a resume from the checkpoint of `after_step`, which may be older than those kept."""
    with reading(engine) as connection:
        return tuple(_groups(connection, run_id, after_step))


def taken_deliveries(
    engine: sa.Engine, run_id: int, after_step: int, most_bytes: int
) -> tuple[r.DeliveryState, ...]:
    """What steps after `after_step` took of other runs' episodes. Of older ones, beyond `most_bytes` of rows, without their rows."""
    wanted = {"run_id": run_id, "after_step": after_step, "most_bytes": most_bytes}
    with reading(engine) as connection:
        return tuple(_struct(r.DeliveryState, row) for row in _ask(connection, "taken_deliveries", **wanted))


def ended_episodes(engine: sa.Engine, run_id: int, most: int) -> tuple[str, ...]:
    """The names of a run's episodes that have ended, of the `most` newest, the newest last."""
    with reading(engine) as connection:
        return tuple(str(name) for (name,) in _tuples(connection, "ended_episodes", run_id=run_id, most=most))


def pass_rates(
    engine: sa.Engine, run_id: int, until_step: int, solved_at: float
) -> tuple[tuple[int, int, int, int], ...]:
    """(step, prompt index, samples with a reward of `solved_at` or more, samples with a reward) of each group that a step up to
    `until_step` trained; the newest `MAX_PASS_RATES`."""
    wanted = {"run_id": run_id, "until_step": until_step, "solved_at": solved_at, "most": MAX_PASS_RATES}
    with reading(engine) as connection:
        return tuple(
            (int(step), int(index), int(passed), int(scored))
            for step, index, passed, scored in _tuples(connection, "pass_rates", **wanted)
        )


def read_payloads(engine: sa.Engine, sample_ids: Sequence[int]) -> dict[int, Payload]:
    """The accepted tokens of samples with their logprobs; a sample that has no row is not in the answer.

    Raises `LedgerUnavailable` when the ledger cannot be read now, `LedgerError` naming a sample whose chunks do not add up to its length.
    """
    query = sa.text(queries.load("payloads")).bindparams(sa.bindparam("sample_ids", expanding=True))
    lengths: dict[int, int] = {}
    pieces: dict[int, list[Piece]] = defaultdict(list)
    with reading(engine) as connection:
        for first in range(0, len(sample_ids), _MOST_NAMED):
            for sample_id, length, *piece in connection.execute(
                query, {"sample_ids": list(sample_ids[first : first + _MOST_NAMED])}
            ):
                lengths[sample_id] = length
                if piece[0] is not None:
                    pieces[sample_id].append((*piece[:4], piece[4] or b""))
    return {
        sample_id: join_chunks(sample_id, pieces[sample_id], length) for sample_id, length in lengths.items()
    }


def run_by_name(engine: sa.Engine, name: str) -> RunRow | None:
    """The newest run of that name; None when there is none."""
    with reading(engine) as connection:
        return next((_struct(RunRow, row) for row in _ask(connection, "run_by_name", name=name)), None)


def newest_run(engine: sa.Engine) -> RunRow | None:
    """The run that was opened last; None in a ledger without any."""
    with reading(engine) as connection:
        return next((_struct(RunRow, row) for row in _ask(connection, "newest_run")), None)


def newest_step(engine: sa.Engine, run_id: int, purpose: str = "train") -> int | None:
    """The newest surviving step of a run, or evaluation; where none was committed the newest that was submitted, None without any."""
    with reading(engine) as connection:
        (row,) = _ask(connection, "newest_step", run_id=run_id, purpose=purpose)
        step: int | None = row["step"]
        return step


def submitted_steps(
    engine: sa.Engine, run_id: int, first: int, last: int, purpose: str = "train"
) -> list[int]:
    """The steps from `first` to `last`, both included, that have groups; in order."""
    wanted = {"run_id": run_id, "purpose": purpose, "first": first, "last": last}
    with reading(engine) as connection:
        return [row["step"] for row in _ask(connection, "submitted_steps", **wanted)]


def keys_in_force(engine: sa.Engine) -> dict[str, tuple[str, str]]:
    """Public key -> (role, name), as the events `key_added` and `key_revoked` tell."""
    found: dict[str, tuple[str, str]] = {}
    with reading(engine) as connection:
        for row in _ask(connection, "key_events"):
            if row["kind"] == "key_added":
                detail = json.loads(row["detail"])
                found[row["subject"]] = detail["role"], detail["name"]
            else:
                found.pop(row["subject"], None)
    return found


def samples_of_step(
    engine: sa.Engine, run: str, step: int, group: int | None = None, purpose: str = "train"
) -> tuple[SampleRow, ...]:
    """The samples generated for a step of the newest run called `run`, in the order of prompts; in every state, in flight too.

    `group` chooses one prompt by its index.
    Raises `LedgerError` for an unknown run.
    """
    found = run_by_name(engine, run)
    if found is None:
        raise LedgerError(
            f"the ledger has no run called {run!r}", "`scavenger ledger report runs` lists them"
        )
    wanted = {"run_id": found.run_id, "step": step, "prompt_index": group, "purpose": purpose}
    with reading(engine) as connection:
        samples = list(_ask(connection, "step_samples", **wanted))
        payloads = _payloads(samples, _ask(connection, "step_chunks", **wanted))
        spans: dict[int, list[LeaseSpan]] = defaultdict(list)
        for row in _ask(connection, "step_leases", **wanted):
            spans[row["sample_id"]].append(_span(row))
    return tuple(_sample_row(row, payloads[row["sample_id"]], spans[row["sample_id"]]) for row in samples)


# ---------------------------------------------------------------- rows to records


def _struct(kind: Any, row: Mapping[str, Any], **renamed: str) -> Any:
    """A record from a row whose columns are called as its fields, or as `renamed` says."""
    return kind(**{name: row[renamed.get(name, name)] for name in kind.__struct_fields__})


def _versions(connection: sa.Connection) -> dict[int, list[r.VersionPublished]]:
    """Of each run. With the manifest of adapters comes that of every version that holds their base: engines pull or serve both."""
    rows = [{**row, "manifest": row["manifest"] or b""} for row in _ask(connection, "snapshot_versions")]
    bases = {(row["run_id"], base) for row in rows if (base := manifests.base_of(row["manifest"]))}
    versions: dict[int, list[r.VersionPublished]] = defaultdict(list)
    for row in rows:
        if not row["manifest"] and (row["run_id"], row["root"]) in bases:
            (kept,) = _ask(connection, "version_manifest", run_id=row["run_id"], version=row["version"])
            row["manifest"] = kept["manifest"]
        versions[row["run_id"]].append(_struct(r.VersionPublished, row, at="published_at"))
    return versions


def _runs(connection: sa.Connection) -> list[r.RunState]:
    versions = _versions(connection)
    # Ordered by step, then by time: of a step that was recorded twice the later stays.
    checkpoints: dict[int, dict[int, r.CheckpointRecorded]] = defaultdict(dict)
    for row in _ask(connection, "snapshot_checkpoints"):
        checkpoints[row["run_id"]][row["step"]] = _struct(r.CheckpointRecorded, row, at="recorded_at")
    return [
        r.RunState(
            created=_struct(r.RunCreated, row, at="created_at"),
            attempt=row["attempt"],
            resume_step=row["resume_step"],
            last_step=row["last_step"],
            engine=row["attempt_engine"],
            config=row["attempt_config"],
            versions=tuple(versions[row["run_id"]]),
            checkpoints=tuple(checkpoints[row["run_id"]].values()),
            ended=row["state"] != "active",
            job_id=row["attempt_job_id"],
        )
        for row in _ask(connection, "snapshot_runs")
    ]


def _groups(connection: sa.Connection, run_id: int, final: int) -> Iterator[r.OpenGroup]:
    # A hundred thousand samples are read here while a fleet waits: plain rows, in the order of the records' fields.
    wanted = {"run_id": run_id, "final_step": final}
    members: dict[int, list[r.SampleState]] = defaultdict(list)
    state = r.SampleState
    spans: dict[int, tuple[tuple[int, int], ...]] = {}
    versions: dict[int, tuple[tuple[int, int], ...]] = {}
    for sample_id, worker_id, version, tokens in _tuples(connection, "snapshot_spans", **wanted):
        if tokens > 0:
            spans[sample_id] = _joined(spans.get(sample_id, ()), worker_id, tokens)
            versions[sample_id] = _joined(versions.get(sample_id, ()), version, tokens)
    for group_id, epoch, held_by, held_version, sample_id, index, name, *rest in _tuples(
        connection, "snapshot_samples", **wanted
    ):
        moves, length, finish, reward, ended_step, ended_attempt, reason, reward_version = rest
        lease = None if held_by is None else (epoch, held_by, held_version)
        members[group_id].append(
            state(
                sample_id,
                index,
                name,
                epoch,
                moves,
                length,
                finish,
                reward,
                lease,
                ended_step,
                ended_attempt,
                reason,
                reward_version,
                spans.get(sample_id, ()),
                versions.get(sample_id, ()),
            )
        )
    for version, *made in _tuples(connection, "snapshot_groups", **wanted):
        created = r.GroupCreated(*made)
        samples = members[created.group_id]
        if len(samples) != created.n:
            raise LedgerError(
                f"group {created.group_id} has {len(samples)} samples instead of {created.n}", _RESTORE
            )
        yield r.OpenGroup(created, version, tuple(samples))


def _joined(spans: tuple[tuple[int, int], ...], of: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """With so many tokens more, of this worker or version: one span where it had the sample twice in a row."""
    if spans and spans[-1][0] == of:
        return (*spans[:-1], (of, tokens + spans[-1][1]))
    return (*spans, (of, tokens))


def _payloads(
    samples: Sequence[Mapping[str, Any]], chunks: Iterable[Mapping[str, Any]]
) -> dict[int, Payload]:
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for row in chunks:
        pieces[row["sample_id"]].append(
            (row["start_len"], row["tokens"], row["logprobs"], row["raw_logprobs"], row["routing"] or b"")
        )
    return {
        row["sample_id"]: _GONE
        if row["contents"] in GONE
        else join_chunks(row["sample_id"], pieces[row["sample_id"]], row["accepted_len"])
        for row in samples
    }


def _job(row: Mapping[str, Any], lives: Sequence[r.EngineLife]) -> r.OpenIntent:
    return r.OpenIntent(
        intended=_struct(r.JobIntended, row, at="intended_at"),
        job_id=row["job_id"],
        last_state=row["last_state"],
        restart_count=row["restart_count"],
        node=row["allocation_node"] or row["node"],
        allocation_open=bool(row["allocation_open"]),
        allocated_since=row["allocated_since"] or 0.0,
        last_allocation=row["last_allocation"],
        free_since=max(row["allocation_ended_at"], row["waited_at"] or 0.0),
        lives=tuple(lives),
        polled_at=row["polled_at"] or 0.0,
        run_since=row["run_since"] or 0.0,
    )


def _span(row: Mapping[str, Any]) -> LeaseSpan:
    return LeaseSpan(
        epoch=row["epoch"],
        worker_id=row["worker_id"],
        kind=row["kind"] or "",
        node=row["node"] or "",
        job_id=row["job_id"] or 0,
        start_len=row["start_len"],
        end_len=row["accepted_len"] if row["ended_at"] is None else row["end_len"],
        reason=row["reason"],
    )


def _sample_row(row: Mapping[str, Any], payload: Payload, leases: Sequence[LeaseSpan]) -> SampleRow:
    return _struct(  # type: ignore[no-any-return]
        SampleRow,
        dict(row)
        | {
            "index": row["sample_index"],
            "contents": row["contents"] or "",
            "prompt": unpack_tokens(row["prompt"]),
            "tokens": unpack_tokens(payload[0]),
            "logprobs": unpack_logprobs(payload[1]),
            "leases": tuple(leases),
        },
    )
