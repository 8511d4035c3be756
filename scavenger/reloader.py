"""Reads scavenger.toml again when it is told to (SIGHUP) and applies what may change live. Owns the order: read, compare, apply, tell.

A file that cannot be read or used changes nothing at all; what needs a restart is named and stays as it was: `reload` knows which it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog

from scavenger import reload
from scavenger.config import DaemonConfig
from scavenger.errors import ScavengerError
from scavenger.ledger.records import Event, Record
from scavenger.observe.sdnotify import Notifier

log = structlog.get_logger()


class Reloader:
    """`reread` gives the file's configuration now; `apply` takes the live part of it, and raises before it changes anything."""

    def __init__(
        self,
        config: DaemonConfig,
        reread: Callable[[], DaemonConfig],
        apply: Callable[[DaemonConfig], None],
        write: Callable[[Sequence[Record]], object],
        notifier: Notifier,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self._reread, self._apply, self._write = reread, apply, write
        self._notifier, self._clock = notifier, clock

    async def run(self, asked: asyncio.Event) -> None:
        while True:
            await asked.wait()
            asked.clear()
            self._notifier.reloading()
            self._notifier.ready(await self.once())

    async def once(self) -> str:
        """Returns what to tell the service manager."""
        try:
            plan = reload.plan(self.config, await asyncio.to_thread(self._reread))
            if plan.live:
                self._apply(plan.config)
        except ScavengerError as error:
            log.error("configuration not reloaded; the one in force stays", reason=error.cause, remedy=error.remedy)
            self._write([Event("config_refused", 0, "scavenger.toml", error.cause, "{}", self._clock())])
            return "serving; the changed configuration was refused"
        self.config = plan.config
        live, restart = [str(change) for change in plan.live], [str(change) for change in plan.restart]
        log.info("configuration reloaded", changed=live)
        if restart:
            log.warning("these keys change at a restart only; their old values stay in force", keys=restart)
        detail = msgspec.json.encode({"changed": live, "needs_restart": restart}).decode()
        said = f"{len(live)} keys changed, {len(restart)} need a restart"
        self._write([Event("config_reloaded", 0, "scavenger.toml", said, detail, self._clock())])
        return f"serving; {said}"
