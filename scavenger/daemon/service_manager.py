"""The daemon's side to the service manager: readiness and watchdog, Prometheus, and SIGHUP. Wires these parts; each does its own work.

Boundary: the service manager (systemd), signals and the metrics port.

Owns when the metrics are served, and the order of a reload: read scavenger.toml, compare, apply what may change live, report. A file that
cannot be read or used changes nothing at all; `reload` says what needs a restart. Decides nothing, and costs nothing where it is not
configured: without `prometheus.listen` no record is counted, without a service manager nothing is sent.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from scavenger.cluster import job_logs
from scavenger.config import DaemonConfig
from scavenger.daemon import reload
from scavenger.daemon.systemd import Notifier
from scavenger.errors import ScavengerError
from scavenger.harvest.harvester import Harvester
from scavenger.ledger import records as rec
from scavenger.ledger.records import Event, Record
from scavenger.observe import metrics, reading
from scavenger.observe.exporter import Exporter
from scavenger.observe.status import Status
from scavenger.observe.tally import Tally, TallyingWriter, Writes
from scavenger.router.edge.server import RouterServer

#: A daemon that waits for another one's end says so before the manager's patience is over.
TIMEOUT_S = 60.0


class ServiceManager:
    """`reread` gives the configuration file's content now; without it SIGHUP is left as it was (it ends a daemon of a terminal)."""

    def __init__(
        self,
        config: DaemonConfig,
        reread: Callable[[], DaemonConfig] | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self.config = config
        self.notifier = notifier or Notifier({}, 0)
        self._reread = reread
        self._tally = Tally() if config.prometheus.listen else None
        self._counted: TallyingWriter | None = None
        self._exporter: Exporter | None = None
        self._asked = asyncio.Event()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._reread is not None:
            loop.add_signal_handler(signal.SIGHUP, self._asked.set)

    def serve_metrics(self) -> None:
        """Raises `ConfigError` when the address cannot be had."""
        if self.config.prometheus.listen:
            self._exporter = Exporter(self.config.prometheus.listen)

    @property
    def address(self) -> str:
        """Where the metrics are, "" = nowhere."""
        return self._exporter.address if self._exporter is not None else ""

    def waiting(self, status: str) -> None:
        self.notifier.waiting(status, TIMEOUT_S)

    def counted(self, writer: Writes, clock: Callable[[], float]) -> Writes:
        """What the server is to write to."""
        if self._tally is None:
            return writer
        self._counted = TallyingWriter(writer, self._tally, clock)
        return self._counted

    def restore(self, snapshot: rec.Snapshot) -> None:
        if self._tally is not None:
            self._tally.restore(snapshot)

    def work(
        self,
        server: RouterServer,
        harvester: Harvester | None,
        further: Callable[[], Mapping[str, Harvester]],
        read_status: Callable[[], Status],
        clock: Callable[[], float],
        obey: Callable[[DaemonConfig], None],
        stop: asyncio.Event,
    ) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the server until `stop`. `further`: harvesters of further clusters, by name. `obey` takes the live part of a
        configuration that was read again, or raises."""
        found: list[Coroutine[Any, Any, None]] = [self.notifier.watch(lambda: server.turns, stop)]
        if self._reread is not None:
            reloader = Reloader(self.config, self._reread, obey, server.write, self.notifier, clock)
            found.append(reloader.run(self._asked))
        if harvester is not None:
            found.append(job_logs.watch(harvester.bound_logs, lambda: harvester.tracker.intents.keys(), stop))
        if self._exporter is not None and self._tally is not None and self._counted is not None:
            tally, counted, core = self._tally, self._counted, server.router.core

            def read() -> metrics.Reading:
                status = read_status()
                own = {"": harvester} if harvester is not None else {}
                all_of_them = {**own, **further()}
                ill = {
                    name: len(one.tracker.health.quarantined(status.at)) for name, one in all_of_them.items()
                }
                demand = server.router.demand(status.at) if all_of_them else ()
                lag_s = counted.lag_s(status.backlog_records)
                rpcs = {name: one.cluster.rpc.counts() for name, one in all_of_them.items()}
                return reading.take(status, core, tally, lag_s, demand, rpcs, ill)

            found.append(self._exporter.run(read, stop))
        return found

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        self.notifier.close()


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
            log.error(
                "configuration not reloaded; the one in force stays", reason=error.cause, remedy=error.remedy
            )
            self._write([Event("config_refused", 0, "scavenger.toml", error.cause, "{}", self._clock())])
            return "serving; the changed configuration was refused"
        self.config = plan.config
        live, restart = [str(change) for change in plan.live], [str(change) for change in plan.restart]
        log.info("configuration reloaded", changed=live)
        if restart:
            log.warning("these keys change at a restart only; their old values stay in force", keys=restart)
        detail = msgspec.json.encode({"changed": live, "needs_restart": restart}).decode()
        summary = f"{len(live)} keys changed, {len(restart)} need a restart"
        self._write([Event("config_reloaded", 0, "scavenger.toml", summary, detail, self._clock())])
        return f"serving; {summary}"
