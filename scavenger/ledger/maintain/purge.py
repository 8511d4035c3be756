"""Deleting a run's contents and keeping its accounting. Contents: tokens, logprobs, prompts, what came with them, a trainer's words.

Owns the transactions. The only writer beside the daemon's. It may be: each of its transactions first locks the run's row and refuses
unless the run has ended, and the only writer of an ended run is an attempt that opens it again, whose grant changes that row. The daemon
reads an opened run's history after that grant, so it sees a portion's contents as gone or keeps them. Rows stay, with empty payloads:
every sum, count and time over them is what it was.

Boundary: what is deleted for privacy, in one place to be reviewed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import redaction, store
from scavenger.ledger.faults import FINAL, classify, explain, remedy
from scavenger.ledger.read import reader
from scavenger.ledger.read.reports import utc
from scavenger.ledger.schema import (
    chunks,
    deliveries,
    groups,
    runs,
    sample_ends,
    samples,
    steps,
    token_differences,
    tool_calls,
    turn_samples,
    turns,
)
from scavenger.ledger.write.transaction import open_connection

T = TypeVar("T")
#: One transaction's share, of deliveries and of tools' answers too. SQLite's writer waits for it.
PORTION_GROUPS = 32
_TIMEOUT_S = 60.0
#: Between two tries of a portion that found the ledger locked or away: nothing tells when it is free.
_PAUSE_S = 0.2
#: Instead of the words of a trainer: ours quotes nothing, but a site's own may, and those of earlier releases did.
PURGED = "purged"
#: Versions of reward functions among the samples of one portion.
MOST_VERSIONS = 64


@dataclass(frozen=True, slots=True)
class Contents:
    """What a run holds that a purge takes, or took."""

    run_id: int
    groups: int
    samples: int
    chunks: int
    tokens: int
    nbytes: int
    purged_at: float | None = None  # when a purge of what was there until then ended

    @property
    def gone(self) -> str:
        """When all contents were purged, in words; "" while some are left."""
        return (
            f"was purged at {utc(self.purged_at)}" if self.purged_at is not None and not self.nbytes else ""
        )


def survey(url: str, name: str) -> Contents:
    """What `purge` would delete now. Raises `LedgerError` for an unknown run or one that has not ended."""
    engine = store.open_readonly(url, store.MAINTENANCE_S)
    try:
        with engine.connect() as connection:
            store.require_head(connection)
        run_id = _run(engine, name)
        kept = samples.c.run_id == run_id
        joined = sa.join(chunks, samples, chunks.c.sample_id == samples.c.sample_id)
        sizes = (
            sa.func.length(chunks.c.tokens)
            + sa.func.length(chunks.c.logprobs)
            + sa.func.length(chunks.c.raw_logprobs)
            + sa.func.coalesce(sa.func.length(chunks.c.routing), 0)
        )
        held = (sa.func.length(chunks.c.tokens) > 0).self_group()
        with engine.connect() as connection, connection.begin():
            n_chunks, tokens, nbytes, n_samples = connection.execute(
                sa.select(
                    sa.func.count(),
                    sa.func.sum(chunks.c.n_tokens),
                    sa.func.sum(sizes),
                    sa.func.count(sa.distinct(chunks.c.sample_id)),
                )
                .select_from(joined)
                .where(kept, held)
            ).one()
            n_groups, of_prompts = connection.execute(
                sa.select(
                    sa.func.count(),
                    sa.func.sum(sa.func.length(groups.c.prompt) + sa.func.length(groups.c.meta)),
                ).where(groups.c.run_id == run_id, sa.func.length(groups.c.prompt) > 0)
            ).one()
            purged_at = connection.execute(
                sa.select(runs.c.purged_at).where(runs.c.run_id == run_id)
            ).scalar_one()
        return Contents(
            run_id,
            n_groups,
            n_samples,
            n_chunks,
            int(tokens or 0),
            int(nbytes or 0) + int(of_prompts or 0),
            purged_at,
        )
    except sa.exc.DBAPIError as error:
        raise LedgerError(
            f"the ledger cannot be read: {explain(error)}", "check that it is reachable"
        ) from error
    finally:
        engine.dispose()


def purge(url: str, name: str, now: Callable[[], float] = time.time) -> Contents:
    """Delete the contents of the newest run of that name; returns what was deleted. Repeating it is harmless and finishes it.

    Raises `LedgerError` for an unknown run, one that has not ended, or a ledger that stays locked.
    """
    taken = survey(url, name)
    engine = store.open_engine(url)
    try:
        for portion in (_portion, _answers_of_tools, _delivered):
            after: int | None = 0
            while after is not None:
                after = _patiently(
                    engine, functools.partial(portion, run_id=taken.run_id, name=name, after=after)
                )
        _patiently(engine, functools.partial(_finish, run_id=taken.run_id, name=name, now=now()))
    finally:
        engine.dispose()
    return taken


def _run(engine: sa.Engine, name: str) -> int:
    run = reader.run_by_name(engine, name)
    if run is None:
        raise LedgerError(
            f"the ledger has no run called {name!r}", "`scavenger ledger report runs` lists them"
        )
    _require_ended(name, run.state)
    return run.run_id


def _require_ended(name: str, state: str | None) -> None:
    if state == "active":
        raise LedgerError(
            f"run {name!r} is active: its trainer or a resume needs its contents",
            "let it end, or close it, then purge",
        )


def _patiently(engine: sa.Engine, work: Callable[[sa.Connection], T]) -> T:
    """Run `work` in a transaction of its own; again, while the daemon's transactions keep the database busy."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            with open_connection(engine) as connection, connection.begin():
                if connection.dialect.name == "sqlite":
                    connection.exec_driver_sql(
                        "PRAGMA secure_delete=ON"
                    )  # what is freed is overwritten, not only unlinked
                return work(connection)
        except sa.exc.DBAPIError as error:
            state = classify(error)
            if state in FINAL or time.monotonic() > deadline:
                raise LedgerError(
                    f"the purge stopped half-way: {explain(error)}", f"{remedy(error)}; then purge again"
                ) from error
        time.sleep(_PAUSE_S)


def _lock(connection: sa.Connection, run_id: int, name: str) -> None:
    _require_ended(
        name,
        connection.execute(sa.select(runs.c.state).where(runs.c.run_id == run_id).with_for_update()).scalar(),
    )


def _portion(connection: sa.Connection, run_id: int, name: str, after: int) -> int | None:
    """Delete the contents of the next groups; returns the last one's id, None when there are no more."""
    _lock(connection, run_id, name)
    next_groups = sa.select(groups.c.group_id).where(groups.c.run_id == run_id, groups.c.group_id > after)
    found = list(connection.execute(next_groups.order_by(groups.c.group_id).limit(PORTION_GROUPS)).scalars())
    if not found:
        return None
    members = sa.select(samples.c.sample_id).where(samples.c.group_id.in_(found))
    connection.execute(
        sa.update(chunks)
        .where(chunks.c.sample_id.in_(members), sa.func.length(chunks.c.tokens) > 0)
        .values(tokens=b"", logprobs=b"", raw_logprobs=b"", routing=b"")
    )
    connection.execute(
        sa.update(token_differences).where(token_differences.c.sample_id.in_(members)).values(differences=b"")
    )
    connection.execute(sa.update(samples).where(samples.c.group_id.in_(found)).values(contents="purged"))
    connection.execute(sa.update(turns).where(turns.c.group_id.in_(found)).values(prompt_sha256=b""))
    connection.execute(sa.delete(turn_samples).where(turn_samples.c.sample_id.in_(members)))
    for said, theirs in (
        (samples, samples.c.group_id.in_(found)),
        (sample_ends, sample_ends.c.sample_id.in_(members)),
    ):
        _take_words(connection, said, theirs)
    length = sa.func.coalesce(
        groups.c.purged_prompt_tokens, sa.func.length(groups.c.prompt, type_=sa.Integer) // 4
    )
    connection.execute(
        sa.update(groups)
        .where(groups.c.group_id.in_(found))
        .values(prompt=b"", meta="", purged_prompt_tokens=length)
    )
    return int(found[-1])


def _answers_of_tools(connection: sa.Connection, run_id: int, name: str, after: int) -> int | None:
    """As `_portion`, of what tools answered."""
    _lock(connection, run_id, name)
    answered = tool_calls.c.run_id == run_id, sa.func.length(tool_calls.c.answer) > 0
    return _emptied(connection, tool_calls.c.call_id, tool_calls.c.answer, after, *answered)


def _delivered(connection: sa.Connection, run_id: int, name: str, after: int) -> int | None:
    """As `_portion`, of what the run's policy said and was asked: its own tokens, whichever run played the episodes."""
    _lock(connection, run_id, name)
    kept = deliveries.c.run_id == run_id, sa.func.length(deliveries.c.episode_rows) > 0
    return _emptied(connection, deliveries.c.delivery_id, deliveries.c.episode_rows, after, *kept)


def _emptied(
    connection: sa.Connection,
    key: sa.Column[int],
    payload: sa.Column[bytes],
    after: int,
    *which: sa.ColumnElement[bool],
) -> int | None:
    """Empty the next rows' payloads; returns the last one's key, None when there are no more."""
    keys = sa.select(key).where(*which, key > after).order_by(key).limit(PORTION_GROUPS)
    found = list(connection.execute(keys).scalars())
    if not found:
        return None
    connection.execute(sa.update(key.table).where(key.in_(found)).values({payload: b""}))
    return int(found[-1])


def _take_words(connection: sa.Connection, said: sa.Table, theirs: sa.ColumnElement[bool]) -> None:
    """Replace a trainer's free text on its samples: our own reasons stay, versions of its reward function become digests."""
    given = (theirs, said.c.state.in_(redaction.OUTCOMES), said.c.reason != "")
    reasons = connection.execute(
        sa.select(said.c.reason).where(*given, said.c.state != "masked").distinct()
    ).scalars()
    known = [reason for reason in reasons if redaction.is_known(reason)]
    unknown = sa.or_(said.c.state == "masked", said.c.reason.not_in(known))
    connection.execute(sa.update(said).where(*given, unknown).values(reason=PURGED))
    versions = list(
        connection.execute(
            sa.select(said.c.reward_version).where(theirs, said.c.reward_version != "").distinct()
        ).scalars()
    )
    if len(versions) > MOST_VERSIONS:  # no function has so many: it says something of each sample
        connection.execute(
            sa.update(said).where(theirs, said.c.reward_version.in_(versions)).values(reward_version=PURGED)
        )
        return
    for version in versions:
        purged = redaction.purged_version(version)
        if purged != version:
            connection.execute(
                sa.update(said).where(theirs, said.c.reward_version == version).values(reward_version=purged)
            )


def _take_names(connection: sa.Connection, run_id: int) -> None:
    """Replace the names of a trainer's metrics: our own stay, the others become digests."""
    for row in connection.execute(
        sa.select(steps.c.id, steps.c.metrics).where(steps.c.run_id == run_id)
    ).all():
        kept = msgspec.json.decode(row.metrics, type=dict[str, float | None])  # null: not a number
        purged = redaction.purged_metrics(kept)
        if purged != kept:
            connection.execute(
                sa.update(steps)
                .where(steps.c.id == row.id)
                .values(metrics=msgspec.json.encode(purged).decode())
            )


def _finish(connection: sa.Connection, run_id: int, name: str, now: float) -> None:
    _lock(connection, run_id, name)
    _take_names(connection, run_id)
    words = sa.case((runs.c.reason != "", PURGED), else_=runs.c.reason)
    connection.execute(sa.update(runs).where(runs.c.run_id == run_id).values(purged_at=now, reason=words))
