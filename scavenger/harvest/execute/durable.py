"""How long the harvester waits for its records to be durable, and what it writes of its decisions.

A ledger that cannot take a transaction (no space, no connection) stalls, and whoever waits for it with it. Harvesting must not: others
wait for GPUs, and somebody may have stopped it. So the wait is bounded, and whoever waited decides what to do without.

Owns that bound and the events that tell of a stall. Knows nothing of jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import structlog

from scavenger.harvest.decide.actions import Action, Cancel, CancelPending, DrainAllocated, Release, Submit
from scavenger.ledger import records as rec

log = structlog.get_logger()


class Durable:
    """`commit` returns when its records are durable, `write` at once; both raise when this daemon may write no more (`Fenced`)."""

    def __init__(
        self,
        commit: Callable[[Sequence[rec.Record]], Awaitable[None]],
        write: Callable[[Sequence[rec.Record]], object],
        patience_s: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._commit, self._write, self._patience_s, self._clock = commit, write, patience_s, clock
        self.stalled = False

    async def within(self, records: Sequence[rec.Record]) -> bool:
        """Whether the records are durable in time. False: they are queued, and will be if the ledger recovers. Raises `Fenced`."""
        patience_s = self._patience_s()
        try:
            async with asyncio.timeout(patience_s):
                await self._commit(records)
        except TimeoutError:
            why = f"no record became durable within {patience_s:g} s: nothing is submitted, and jobs are cancelled all the same"
            # written also when there is nothing new to tell: a writer that was fenced meanwhile says so here
            self._write(
                [] if self.stalled else [rec.Event("ledger_stalled", 0, "ledger", why, "{}", self._clock())]
            )
            if not self.stalled:
                log.warning("ledger stalled", reason=why)
            self.stalled = True
            return False
        if self.stalled:
            self.stalled = False
            self._write(
                [rec.Event("ledger_back", 0, "ledger", "records become durable again", "{}", self._clock())]
            )
        return True


def decided(action: Action, intent_id: str, inputs: str, now: float) -> rec.Decision:
    """The record of one action."""
    names = {
        Submit: "submit",
        Release: "release",
        CancelPending: "cancel_pending",
        DrainAllocated: "give_back",
        Cancel: "cancel",
    }
    return rec.Decision("harvest", names[type(action)], intent_id, action.reason, inputs, now, action.code)


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
