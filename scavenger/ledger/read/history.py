"""Reads what a run did, out of the ledger, as a `RunHistory`. Draws no conclusions and writes nothing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import queries
from scavenger.ledger.read.reader import reading
from scavenger.policy.history import (
    Completion,
    EngineLifetime,
    Flush,
    LeaseInterval,
    RunHistory,
    Step,
    WeightLoad,
)

#: The end reasons of an allocation whose GPUs other users' jobs wanted.
TAKEN = ("preempted", "requeued", "node_fail")


def read(engine: sa.Engine, name: str, after_step: int = 0, most_chunks: int = 1 << 62) -> RunHistory:
    """The run's steps after `after_step`, with their samples, leases and engines. Raises `LedgerError`, also for an unknown run.

    `most_chunks`: what was generated is read as far as it lies among the ledger's newest chunks.
    """
    with reading(engine) as connection:
        run = next(_ask(connection, "run_by_name", name=name), None)
        if run is None:
            raise LedgerError(f"the ledger has no run {name!r}", "`scavenger ledger report runs` names them")
        which = {"run_id": run["run_id"], "after_step": after_step}
        steps = _steps(connection, which)
        since = min((step.submitted_at for step in steps), default=0.0)
        return RunHistory(
            name=name,
            config=run["config"],
            engine=run["engine"],
            steps=steps,
            lives=_lives(connection, {"run_id": run["run_id"], "since": since}),
            spans=tuple(LeaseInterval(**row) for row in _ask(connection, "recorded_leases", **which)),
            flushes=tuple(
                Flush(row["sample_id"], row["worker_id"], row["start_len"], row["n_tokens"], row["at"])
                for row in _ask(connection, "recorded_chunks", most=most_chunks, **which)
            ),
            policy=_policy(connection, name) if steps else "",
            engines=_engines(connection, name),
        )


def _ask(connection: sa.Connection, query: str, /, **parameters: Any) -> Any:
    result = connection.execute(sa.text(queries.load(query)), parameters)
    return (dict(row) for row in result.mappings())


def _steps(connection: sa.Connection, which: Mapping[str, Any]) -> tuple[Step, ...]:
    completions: dict[int, list[Completion]] = defaultdict(list)
    asked: dict[int, float] = {}
    caps: dict[int, int] = {}
    for row in _ask(connection, "recorded_samples", **which):
        step = row["step"]
        asked[step] = min(asked.get(step, row["created_at"]), row["created_at"])
        if step not in caps:  # one for all of them
            caps[step] = int(json.loads(row["sampling"])["max_tokens"])
        completions[step].append(
            Completion(
                row["sample_id"],
                row["group_id"],
                row["prompt_index"],
                row["sample_index"],
                row["prompt_tokens"],
                row["length"],
                row["finish"],
                row["state"],
                row["worker_id"],
                row["finished_at"],
            )
        )
    committed = {row["step"]: row for row in _ask(connection, "recorded_steps", **which)}
    return tuple(
        Step(
            step,
            caps[step],
            asked[step],
            committed[step]["committed_at"] if step in committed else None,
            json.loads(committed[step]["metrics"]) if step in committed else {},
            tuple(completions[step]),
        )
        for step in sorted(completions)
    )


def _lives(connection: sa.Connection, which: Mapping[str, Any]) -> tuple[EngineLifetime, ...]:
    workers = list(_ask(connection, "recorded_workers", **which))
    # An engine may be older than the steps: what it loaded first is no load of theirs.
    since = min((row["joined_at"] for row in workers), default=0.0)
    loads: dict[int, list[WeightLoad]] = defaultdict(list)
    for row in _ask(connection, "recorded_loads", run_id=which["run_id"], since=since):
        detail = json.loads(row["detail"])
        worker_id, version = (
            int(row["subject"].removeprefix("worker ")),
            int(row["reason"].removeprefix("version ")),
        )
        loads[worker_id].append(
            WeightLoad(row["at"], version, float(detail.get("pull_s", 0.0)), float(detail.get("load_s", 0.0)))
        )
    return tuple(
        EngineLifetime(
            row["worker_id"],
            row["kind"],
            row["intent_id"],
            row["incarnation"],
            row["node"],
            row["gpus"],
            row["joined_at"],
            row["left_at"],
            row["left_at"] is not None
            and (
                bool(row["notice"]) if row["allocation_reason"] is None else row["allocation_reason"] in TAKEN
            ),
            bool(row["notice"]),
            row["reason"] or "",
            tuple(loads[row["worker_id"]]),
        )
        for row in workers
    )


def _engines(connection: sa.Connection, name: str) -> int | None:
    row = next(_ask(connection, "recorded_engines", name=name), None)
    if row is None:
        return None
    target = json.loads(row["inputs"]).get("sized", {}).get("target")
    return None if target is None else int(target)


def _policy(connection: sa.Connection, name: str) -> str:
    """Which policy decided for the run: `Standard` leaves no decision of its own."""
    predicted = connection.execute(
        sa.text("SELECT count(*) FROM decisions WHERE policy = 'window' AND subject = :name"), {"name": name}
    ).scalar_one()
    return "predictive" if predicted else "standard"
