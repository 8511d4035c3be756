"""A run of several steps with moved samples, checkpoints and evaluations, for what keeps the ledger small; and its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from scavenger.ledger import queries, store
from scavenger.ledger import records as r
from scavenger.ledger.maintain.keeper import Keeper
from scavenger.ledger.read import reader
from scavenger.ledger.read.reports import report
from scavenger.ledger.retention import Policy
from tests.ledger.examples import (
    T0,
    Witness,
    chunk,
    consumed,
    group,
    moved_group,
    preempted,
    prologue,
    witness,
)

STEPS = 5
#: The trainer keeps two checkpoints: the older is of step 2.
CHECKPOINTS = (1, 2, 4)


def first_sample(step: int) -> int:
    return 100 * step + 1


def training(steps: int = STEPS) -> list[list[r.Record]]:
    """Each step has one group of two: the first sample moved in mid-answer. Step 3 has a superseded take before it."""
    history: list[list[r.Record]] = [prologue()]
    for step in range(1, steps + 1):
        group_id, first = 10 * step, first_sample(step)
        if step == 3:
            given_up = msgspec.structs.replace(group(29, 291, 1, step, 1), prompt_index=group_id % 10)
            history.append([given_up, r.LeaseGranted(291, 1, 1, 1, 0, T0), chunk(291, 1, 0, 2, 1)])
            history.append(
                [
                    r.LeaseEnded(291, 1, "superseded", 2, 0, T0),
                    r.SampleEnded(291, "superseded", "x", 0, 0, None, None, T0),
                ]
            )
        taken = moved_group(group_id, first, step)
        if step == 3:
            taken[0] = group(group_id, first, 2, step, 1, retry=1)
        history += [taken, consumed(group_id, first, step)]
        if step in CHECKPOINTS:
            history.append([r.CheckpointRecorded(1, step, 1, b"root", f"/ckpt/{step}", T0 + 12)])
    history += [evaluation(2), evaluation(STEPS), preempted()]
    return history


def evaluation(step: int) -> list[r.Record]:
    group_id, sample = 1000 + 10 * step, 1000 + step
    return [
        group(group_id, sample, 1, step, 1, purpose="eval"),
        r.LeaseGranted(sample, 1, 2, 1, 0, T0 + 6),
        chunk(sample, 1, 0, 2, 2),
        chunk(sample, 1, 2, 2, 2),
        r.LeaseEnded(sample, 1, "finished", 4, 0, T0 + 7),
        r.SampleFinished(sample, "stop", 4, T0 + 7),
        r.SampleEnded(sample, "evaluated", "", step, 1, 1.0, None, T0 + 8),
        r.StepCommitted(1, step, "eval", 1, 1, "{}", T0 + 8),
    ]


def ended() -> list[r.Record]:
    return [r.WorkerLeft(2, "drained", True, 0, 0, 0, T0 + 23), r.RunEnded(1, "finished", "", T0 + 24)]


def keep(url: str, policy: Policy, witnessed: Witness | None = None) -> int:
    """Let the keeper look once, with a writer of its own unless one is given; returns the number of samples dealt with."""
    if witnessed is None:
        with witness(url) as w:
            return keep(url, policy, w)
    tickets = iter(range(10_000, 20_000))

    async def commit(records: Sequence[r.Record]) -> None:
        ticket = next(tickets)
        witnessed.writer.submit(ticket, records)
        await asyncio.to_thread(witnessed.wait_ticket, ticket)

    engine = store.open_readonly(url)
    try:
        keeper = Keeper(
            engine,
            policy,
            commit=commit,
            backlog_bytes=lambda: witnessed.writer.backlog_bytes,
            clock=lambda: T0 + 100,
        )
        return asyncio.run(keeper.poll())
    finally:
        engine.dispose()


def fetch(url: str, sql: str) -> list[tuple[Any, ...]]:
    engine = store.open_readonly(url)
    try:
        return list(reader.rows(engine, sql).rows)
    finally:
        engine.dispose()


def spoil(url: str, sql: str) -> None:
    """Change the ledger behind the writer's back."""
    engine = store.open_engine(url)
    with engine.connect() as connection, connection.begin():
        connection.execute(sa.text(sql))
    engine.dispose()


def answers(url: str, without: Sequence[str] = ()) -> dict[str, object]:
    """What every report says, as if at one moment: some count up to the last commit, which retention and purges move."""
    spoil(url, f"UPDATE generations SET committed_at = {T0 + 3600}")
    return {
        name: json.loads(report(url, name, "json"))["rows"]
        for name in queries.report_names()
        if name not in without
    }


def config(tmp_path: Path, url: str) -> Path:
    path = tmp_path / "scavenger.toml"
    path.write_text(f'[daemon]\nstate_dir = "{tmp_path / "state"}"\nledger = "{url}"\n')
    return path
