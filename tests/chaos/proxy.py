"""A TCP proxy between the daemon and everybody else, which can turn into a black hole: connections stay open, nothing passes.

The daemon listens on 127.0.0.1 at a port that the system gave it and advertises `HOST`; the proxy listens there on the same port, which
it reads from the rendezvous file. So no file is rewritten, no port is guessed, and a restarted daemon is found again.
Owns a thread with an event loop. Knows nothing of what passes (it is encrypted).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from scavenger.errors import ScavengerError
from scavenger.protocol import keys

HOST = "127.0.0.2"
CHECK_INTERVAL_S = 0.02


@dataclass(eq=False)
class _Passage:
    """One connection through the proxy. While `open` is clear, what comes is held."""

    client_port: int
    open: asyncio.Event = field(default_factory=asyncio.Event)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)


class Proxy:
    """See the module. As a context manager; `hole` and `heal` may be called from any thread."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._stop = asyncio.Event()
        self._servers: dict[int, asyncio.Server] = {}
        self._passages: set[_Passage] = set()
        self._lost: frozenset[int] = frozenset()  # pids whose connections are in the hole
        self.failure: BaseException | None = None

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def hole(self, pids: Collection[int]) -> None:
        """From now on nothing passes to or from these processes, on present and on new connections."""
        self._call(self._hole, frozenset(pids))

    def heal(self, *, deliver: bool) -> None:
        """Let everything pass again. `deliver`: what was held arrives late; otherwise those connections break."""
        self._call(self._heal, deliver)

    def _call(self, function: object, *arguments: object) -> None:
        async def call() -> None:
            function(*arguments)  # type: ignore[operator]

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)

    def _hole(self, pids: frozenset[int]) -> None:
        self._lost |= pids
        ports = client_ports(self._lost)
        for passage in self._passages:
            if passage.client_port in ports:
                passage.open.clear()

    def _heal(self, deliver: bool) -> None:
        self._lost = frozenset()
        for passage in self._passages:
            if not passage.open.is_set():
                if not deliver:
                    _abort(passage)
                passage.open.set()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(ScavengerError):  # nobody has announced itself yet
                port = int(keys.read_rendezvous(self._state_dir).endpoint.rpartition(":")[2])
                if port not in self._servers:
                    self._servers[port] = await asyncio.start_server(
                        lambda r, w, p=port: self._accept(r, w, p),  # type: ignore[misc]
                        HOST,
                        port,
                    )  # type: ignore[misc]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), CHECK_INTERVAL_S)
        for server in self._servers.values():
            server.close()
        for passage in self._passages:
            _abort(passage)
            passage.open.set()
        while self._passages:
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        passage = _Passage(writer.get_extra_info("peername")[1])
        passage.writers.append(writer)
        self._passages.add(passage)
        if not (self._lost and passage.client_port in client_ports(self._lost)):
            passage.open.set()
        try:
            with contextlib.suppress(
                OSError
            ):  # the daemon is gone or the connection broke: what the other side sees is its end
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
                passage.writers.append(there_writer)
                ways = ((reader, there_writer), (there_reader, writer))
                pumps = [asyncio.create_task(_pump(source, sink, passage)) for source, sink in ways]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                _abort(passage)
                passage.open.set()
                await asyncio.gather(*pumps)
        finally:
            _abort(passage)
            self._passages.discard(passage)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passage: _Passage) -> None:
    with contextlib.suppress(OSError):  # one side has ended; so does the other
        while data := await reader.read(1 << 16):
            await passage.open.wait()
            writer.write(data)
            await writer.drain()


def _abort(passage: _Passage) -> None:
    for writer in passage.writers:
        writer.transport.abort()


# ---------------------------------------------------------------- whose connection it is


def client_ports(pids: Collection[int]) -> frozenset[int]:
    """Local TCP ports of these processes, as /proc has them."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # this descriptor was closed
                    link = os.readlink(f"/proc/{pid}/fd/{name}")
                    if link.startswith("socket:["):
                        inodes.add(link[8:-1])
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes:
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return frozenset(ports)
