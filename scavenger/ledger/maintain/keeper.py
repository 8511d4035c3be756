"""The daemon's task that applies retention, a portion at a time, while the writer has little else to do.

Owns when that is done: it polls the runs, goes through each step by step, and waits for each portion's commit. `retention` decides what is
dropped. It notes in memory up to which step each run is done; a restarted daemon begins at the first step with contents to drop.

Boundary: a task of the daemon, with a clock; the rule itself is `retention`, which is pure.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import sqlalchemy as sa
import structlog

from scavenger.asyncio_helpers import within
from scavenger.errors import LedgerError
from scavenger.ledger import queries
from scavenger.ledger.read import reader
from scavenger.ledger.records import Record
from scavenger.ledger.retention import BECOMES, Policy, RetainedRun, RetainedSample, limit, plan

log = structlog.get_logger()

CHECK_INTERVAL_S = 15.0
#: While more bytes than this wait for the writer, this task waits.
QUIET_BYTES = 262_144
_QUIET_S = 0.05


class Keeper:
    """See the module. `commit` returns once its records are durable."""

    def __init__(
        self,
        engine: sa.Engine,
        policy: Policy,
        *,
        commit: Callable[[Sequence[Record]], Awaitable[None]],
        backlog_bytes: Callable[[], int],
        clock: Callable[[], float],
        check_interval_s: float | None = None,
    ) -> None:
        self._engine, self._policy = engine, policy
        self._commit, self._backlog_bytes, self._clock = commit, backlog_bytes, clock
        self._check_interval_s = CHECK_INTERVAL_S if check_interval_s is None else check_interval_s
        self._done: dict[
            tuple[int, int], int
        ] = {}  # (run_id, attempt) -> the step up to which all was dealt with

    async def run(self, stop: asyncio.Event) -> None:
        """Apply the policy until `stop`. A ledger that cannot be read is tried again at the next poll."""
        while not stop.is_set():
            try:
                await self.poll()
            except LedgerError as error:
                log.warning("retention waits", reason=error.cause)
            await within(stop, self._check_interval_s)

    async def poll(self) -> int:
        """Apply the policy to every run once; returns the number of samples whose contents were reduced."""
        found = 0
        for run in await asyncio.to_thread(runs_to_retain, self._engine):
            found += await self._keep(run)
        return found

    async def _keep(self, run: RetainedRun) -> int:
        done, bound, samples, tokens = (
            self._done.get((run.run_id, run.attempt), -1),
            limit(run, self._policy),
            0,
            0,
        )
        if done >= bound:
            return 0
        while (
            step := await asyncio.to_thread(
                _next_step, self._engine, run.run_id, done, bound, self._policy.to
            )
        ) is not None:
            candidates = await asyncio.to_thread(samples_to_retain, self._engine, run.run_id, step)
            for portion in plan(run, candidates, self._policy, self._clock()):
                while self._backlog_bytes() > QUIET_BYTES:
                    await asyncio.sleep(_QUIET_S)
                await self._commit([portion.record])
                samples, tokens = samples + len(portion.record.sample_ids), tokens + portion.tokens
                log.debug(
                    "retention",
                    run=run.run_id,
                    samples=len(portion.record.sample_ids),
                    to=portion.record.to,
                    reason=portion.reason,
                )
            self._done[run.run_id, run.attempt] = done = step
        self._done[run.run_id, run.attempt] = bound
        if samples:
            log.info(
                "retention",
                run=run.run_id,
                samples=samples,
                tokens=tokens,
                to=self._policy.to,
                up_to_step=bound,
            )
        return samples


def runs_to_retain(engine: sa.Engine) -> list[RetainedRun]:
    """Every run."""
    saved: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for run_id, step, kept in reader.rows(engine, queries.load("retention_checkpoints")).rows:
        saved[run_id].append((step, kept))
    found = reader.rows(engine, queries.load("retention_runs")).rows
    return [
        RetainedRun(run_id, attempt, last, reader.final_step(config, saved[run_id]))
        for run_id, attempt, last, config in found
    ]


def samples_to_retain(engine: sa.Engine, run_id: int, step: int) -> list[RetainedSample]:
    """The samples generated for a step, training and evaluation."""
    rows: Sequence[Sequence[Any]] = reader.rows(
        engine, queries.load("retention_samples"), {"run_id": run_id, "step": step}
    ).rows
    return [RetainedSample(*row) for row in rows]


def _next_step(engine: sa.Engine, run_id: int, done: int, bound: int, to: str) -> int | None:
    """The first step after `done` and up to `bound` with a sample whose contents may become `to`."""
    before = max((contents for contents in BECOMES[to] if contents is not None), default="")
    wanted = {"run_id": run_id, "done": done, "bound": bound, "before": before}
    found = [step for (step,) in reader.rows(engine, queries.load("retention_step"), wanted).rows]
    return min(found, default=None)
