"""The daemon's half of `ledger.py`: the real server, router and writer on one loop in this process, and the clocks around them.

Owns the wiring (as `scavenger.daemon.main` does it), the generator's process and the conversation with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from scavenger.config import RouterSection
from scavenger.daemon import process as interpreter
from scavenger.daemon.process import UnixClock
from scavenger.ledger import store
from scavenger.ledger.read import reader
from scavenger.ledger.records import OpenGroup
from scavenger.ledger.write.writer import Writer, WriterState
from scavenger.policy import registry
from scavenger.protocol import keys
from scavenger.router.core.events import JobGone, PeerIdentity, RouterAction, RouterEvent
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import Payload, PayloadStore
from scavenger.router.core.state import RouterLimits
from scavenger.router.edge.server import KeyRing, RouterServer

RUN = "bench"
#: Silence is no death here: while the parent sets up, engines do not beat.
PAYLOAD_BYTES = 1 << 30
LIMITS = RouterLimits(suspect_s=60.0, dead_s=120.0)


@dataclass
class Cpu:
    """CPU seconds so far: the router's core, the loop's whole thread, the writer's thread, and the whole process."""

    core: float = 0.0
    loop: float = 0.0
    writer: float = 0.0
    process: float = 0.0
    database: float = 0.0


class TimedRouter(Router):
    """The router, and the CPU time of its thread spent inside."""

    cpu_s = 0.0

    def handle(self, event: RouterEvent, now: float) -> list[RouterAction]:
        started = time.thread_time()
        try:
            return super().handle(event, now)
        finally:
            self.cpu_s += time.thread_time() - started


def children_cpu(pid: int) -> float:
    """CPU seconds of a process (a PostgreSQL backend, say), from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Site:
    """One ledger, one server, one generator. Use as `async with Site(...).running() as site`."""

    def __init__(self, url: str, samples: int, samples_each: int, engines: int) -> None:
        self.url, self.samples, self.samples_each = url, samples, samples_each
        self.server_pair, self.owner = keys.generate(), keys.generate()
        self.engine_pairs = [keys.generate(RUN, f"intent-{n}") for n in range(engines)]
        self.clock = UnixClock()
        self.settings: dict[str, str] = {}
        self.failure: str = ""
        self.writer_cpu: Callable[[], float] = lambda: 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        loop = asyncio.get_running_loop()
        store.upgrade(self.url)
        self.settings = read_settings(self.url)

        def committed(ticket: int) -> None:
            self._writer_thread_s = time.thread_time()
            loop.call_soon_threadsafe(self.server.committed, ticket)

        def changed(state: WriterState, reason: str) -> None:
            if state is not WriterState.OK:
                self.failure = f"the writer is {state}: {reason}"

        self._writer_thread_s = 0.0
        writer = Writer(
            self.url, "bench", os.getpid(), "bench", self.clock, on_commit=committed, on_state=changed
        )
        writer.start()
        self.writer = writer

        async def history(run_id: int, after: int) -> tuple[OpenGroup, ...]:
            return await asyncio.to_thread(reader.replay_groups, writer.engine, run_id, after)

        async def payloads(sample_ids: Sequence[int]) -> dict[int, Payload]:
            return await asyncio.to_thread(reader.read_payloads, writer.engine, sample_ids)

        kept = PayloadStore(PAYLOAD_BYTES)
        self.router = TimedRouter(
            LIMITS, writer.generation, kept, new_policy=registry.named(RouterSection().policy)
        )
        keyring = KeyRing()
        keyring.allow(self.owner.public, PeerIdentity("owner", self.owner.public))
        for pair in self.engine_pairs:
            keyring.allow(pair.public, PeerIdentity("worker", pair.public, RUN, pair.intent))
        self.server = RouterServer(
            self.router, writer, keyring, self.server_pair, self.clock, history, kept, payloads
        )
        stop = asyncio.Event()
        port = self.server.bind("127.0.0.1", 0)
        self.server.perform(self.router.restore(reader.read_snapshot(writer.engine), self.clock()))
        interpreter.tune()
        serving = asyncio.create_task(self.server.run(stop))
        try:
            async with self._generator(port):
                yield self
            if self.failure:
                raise SystemExit(self.failure)
        finally:
            stop.set()
            await serving
            await asyncio.to_thread(writer.close)
            self.server.close()

    @contextlib.asynccontextmanager
    async def _generator(self, port: int) -> AsyncIterator[None]:
        program = Path(__file__).with_name("ledger_engines.py")
        self._child = child = await asyncio.create_subprocess_exec(
            sys.executable,
            str(program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 28,
        )
        try:
            spec = {
                "endpoint": f"tcp://127.0.0.1:{port}",
                "server_key": self.server_pair.public,
                "run": RUN,
                "owner": msgspec.to_builtins(self.owner),
                "engines": msgspec.to_builtins(self.engine_pairs),
                "samples": self.samples,
                "samples_each": self.samples_each,
            }
            self._tell(spec)
            await self.reply()
            yield
        finally:
            assert child.stdin is not None
            child.stdin.close()
            if child.returncode is None:
                with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                    await asyncio.wait_for(child.wait(), 5)
            if child.returncode is None:
                child.kill()
                await child.wait()

    def _tell(self, command: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(command).encode() + b"\n")

    async def reply(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = await self._child.stdout.readline()
        if not line:
            raise SystemExit(f"the generator ended: {self.failure or 'see its message above'}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def begin(self, do: str, **command: Any) -> None:
        """Have the generator do something; `reply` waits for it."""
        self._tell({"do": do} | command)

    async def do(self, do: str, **command: Any) -> dict[str, Any]:
        self.begin(do, **command)
        return await self.reply()

    def declare_dead(self, engines: list[int]) -> None:
        """As the harvester does when Slurm says that their jobs are over."""
        for number in engines:
            self.server.post(JobGone(self.engine_pairs[number].intent, 1_000, "node lost", False))

    async def settled(self) -> None:
        """Wait until the writer has nothing left to do."""
        while self.writer.backlog or self.writer.logged_moves:
            await asyncio.sleep(0.005)

    def cpu(self, database_pids: list[int] | None = None) -> Cpu:
        database = sum(children_cpu(pid) for pid in database_pids or [])
        return Cpu(
            self.router.cpu_s, time.thread_time(), self._writer_thread_s, time.process_time(), database
        )

    def database_pids(self) -> list[int]:
        """The processes of a private PostgreSQL; none for SQLite, which works in the writer's thread."""
        if self.url.startswith("sqlite"):
            return []
        engine = store.open_readonly(self.url)
        try:
            with engine.connect() as connection:
                rows = connection.exec_driver_sql(
                    "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                )
                return [int(pid) for (pid,) in rows if Path(f"/proc/{pid}").exists()]
        finally:
            engine.dispose()


def read_settings(url: str) -> dict[str, str]:
    """What durability rests on, read back from the database through the engine that the writer uses."""
    engine = store.open_engine(url)
    try:
        with engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                pragmas = ("journal_mode", "synchronous", "wal_autocheckpoint", "page_size", "cache_size")
                settings = {
                    name: str(connection.exec_driver_sql(f"PRAGMA {name}").scalar()) for name in pragmas
                }
                settings["synchronous"] += {
                    "2": " (FULL)",
                    "1": " (NORMAL)",
                    "0": " (OFF)",
                    "3": " (EXTRA)",
                }.get(settings["synchronous"], "")
                return {
                    "sqlite": str(connection.exec_driver_sql("SELECT sqlite_version()").scalar())
                } | settings
            names = (
                "server_version",
                "synchronous_commit",
                "fsync",
                "full_page_writes",
                "wal_sync_method",
                "shared_buffers",
            )
            return {name: str(connection.exec_driver_sql(f"SHOW {name}").scalar()) for name in names}
    finally:
        engine.dispose()
