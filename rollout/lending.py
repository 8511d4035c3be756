"""The worker of another run in this process, in slots that this run's engine lends it.

    LendSlots --its key file is there--> the borrower's worker: a key, a connection, a store of weights and a session of its own
                                            around `Lends.borrow`, beside the samples of the run whose engine this is

Owns the borrower's life: one at a time, ended before the next, and always before the engine is. It is told to leave as by SIGTERM: it
flushes, says goodbye, and its samples go on elsewhere with all of their tokens. However it ends, this run hears nothing of it, and goes on;
the log does. Knows no message of either run.

Boundary: tasks of one process; IO through the worker that it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from rollout.engines.base import Engine, Lends
from rollout.key_file import read_when_there
from scavenger.errors import EngineError, ScavengerError, describe
from scavenger.protocol.keys import KeyPair
from scavenger.protocol.messages import EngineSpec, LendSlots
from scavenger.protocol.worker.events import EndWorker

#: How long the borrower's key file may take to be seen here.
KEY_S = 30.0
_log = structlog.get_logger(__name__)


class Borrower(Protocol):
    """A worker of another run."""

    async def run(self) -> EndWorker: ...

    def leave(self, reason: str) -> None: ...


#: (its key, spec and engine, slots) -> the worker
NewBorrower = Callable[[KeyPair, EngineSpec, Engine, int], Borrower]


class Lending:
    """See the module. `key`: the borrower's key file; None: this process lends nothing."""

    def __init__(self, key: Path | None, new_borrower: NewBorrower) -> None:
        self._key, self._new_borrower = key, new_borrower
        self._borrower: Borrower | None = None
        self._lends: Lends | None = None
        self._loan: asyncio.Task[None] | None = None
        self._newest: LendSlots | None = None  # order
        self._over = ""  # why this process lends no more

    def order(self, order: LendSlots, engine: Engine, spec: EngineSpec) -> None:
        """Begin a loan once the one before is over, or only end that. Returns at once."""
        if self._over:
            return
        before, self._newest = self._loan, order
        self._leave(order.reason)
        self._loan = asyncio.create_task(self._carry_out(order, engine, spec, before))

    def leave(self, reason: str) -> None:
        """The worker of the run whose engine this is leaves: so does the borrower, and no other begins."""
        if not self._over:
            self._over = reason
            if self._lends is not None:
                self._lends.recall()
            self._leave(reason)

    async def end(self, reason: str) -> None:
        """The same, and wait until it has left. Its own bounds on goodbyes hold."""
        self.leave(reason)
        if self._loan is not None:
            await asyncio.wait((self._loan,))

    def _leave(self, reason: str) -> None:
        if self._borrower is not None:
            self._borrower.leave(reason)
        elif self._loan is not None:
            self._loan.cancel()

    async def _carry_out(
        self, order: LendSlots, engine: Engine, spec: EngineSpec, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait((before,))
        if not order.public_key or self._over or self._newest is not order:
            return
        if self._key is None or not isinstance(engine, Lends) or not order.slots:
            why = "this engine is not one to be shared" if order.slots else "no slots are lent"
            _log.warning("lending.refused", run=order.run, reason=why)
            return
        try:
            pair = await read_when_there(self._key, order.public_key, KEY_S)
        except (ScavengerError, OSError) as error:
            _log.warning("lending.refused", run=order.run, reason=describe(error))
            return
        self._lends = engine
        borrowed = engine.borrow(order.slots)
        try:
            self._borrower = self._new_borrower(pair, spec, borrowed, order.slots)
            _log.info("lending.began", run=pair.run, slots=order.slots, reason=order.reason)
            end = await self._borrower.run()
        except Exception as error:  # noqa: BLE001  in another run's worker: this run, and its next loan, go on
            _log.error("lending.failed", run=pair.run, exc_info=error)
            with contextlib.suppress(EngineError):  # the engine died: its own worker reports that
                await borrowed.close()
        else:
            _log.info("lending.ended", run=pair.run, code=end.code, reason=end.reason)
        finally:
            self._borrower = None
