"""Real parts for tests of the daemon's edge: a server on a CURVE socket over a SQLite ledger, and workers scripted in threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from scavenger.daemon import ownership
from scavenger.errors import Fenced
from scavenger.ledger import store
from scavenger.ledger.read import reader
from scavenger.ledger.records import OpenGroup
from scavenger.ledger.write.writer import Writer, WriterState
from scavenger.protocol import keys, messages
from scavenger.router.core.events import PeerIdentity
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import Payload, PayloadStore
from scavenger.router.core.state import RouterLimits
from scavenger.router.edge.server import KeyRing, RouterServer
from tests.router.harness import payload

LIMITS = RouterLimits(heartbeat_s=0.3, suspect_s=2.0, dead_s=6.0, reconnect_s=6.0)


class LiveDaemon:
    """The router's server and the ledger's writer on a loop in a thread of their own. `kill` drops what is not committed."""

    def __init__(
        self, state_dir: Path, url: str = "", keyring: KeyRing | None = None, payload_bytes: int = 2**20
    ) -> None:
        self.state_dir = state_dir
        self.payload_bytes = payload_bytes
        keys.init_state(state_dir, "owner")
        self.url = url or f"sqlite:///{state_dir / 'ledger.sqlite3'}"
        self.keyring = keyring or KeyRing()
        self.fenced = threading.Event()
        self._owners: set[str] = set()
        self.allow_owners()
        self._thread: threading.Thread | None = None
        self._port = 0
        self.error: BaseException | None = None
        self.may_fail = False
        self.readable = threading.Event()  # cleared: tokens are not read back, as on a slow disk
        self.readable.set()
        self.read_errors: list[Exception] = []  # what the next reads raise

    def allow_owners(self) -> None:
        """As the daemon does every few seconds."""
        owners = keys.enrolled_owners(self.state_dir)
        for gone in self._owners - set(owners):
            self.keyring.revoke(gone)
        for public, recorded in owners.items():
            self.keyring.allow(public, PeerIdentity("owner", recorded))
        self._owners = set(owners)

    def __enter__(self) -> LiveDaemon:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None and self.error is not None:
            raise self.error

    def start(self, *, same_port: bool = False) -> None:
        self._port = self._port if same_port else 0
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), name="daemon")
        self._thread.start()
        assert ready.wait(20), self.error

    def stop(self, *, drain: bool = True) -> None:
        if self._thread is not None:
            self._drain = drain
            with contextlib.suppress(RuntimeError):  # it was fenced and has ended by itself
                self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(20)
            assert not self._thread.is_alive()
            self._thread = None

    def kill(self) -> None:
        """As SIGKILL would: what the writer has not committed is lost."""
        self.stop(drain=False)

    async def _main(self, ready: threading.Event) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop, self._drain = asyncio.Event(), True
        store.upgrade(self.url)

        def committed(ticket: int) -> None:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(lambda: self.server.committed(ticket))

        def changed(state: WriterState, reason: str) -> None:
            if state is WriterState.FENCED:  # as the daemon does: it stops at once
                self.fenced.set()
                self.loop.call_soon_threadsafe(self._stop.set)

        self.writer = writer = Writer(
            self.url,
            "host",
            os.getpid(),
            "test",
            time.time,
            on_commit=committed,
            on_state=changed,
            announced=ownership.announced(self.state_dir),
        )
        writer.start()

        def read(sample_ids: Sequence[int]) -> dict[int, Payload]:
            assert self.readable.wait(20)
            if self.read_errors:
                raise self.read_errors.pop(0)
            return reader.read_payloads(writer.engine, sample_ids)

        async def payloads(sample_ids: Sequence[int]) -> dict[int, Payload]:
            return await asyncio.to_thread(read, sample_ids)

        async def history(run_id: int, after: int) -> tuple[OpenGroup, ...]:
            return await asyncio.to_thread(reader.replay_groups, writer.engine, run_id, after)

        async def ended_episodes(run_id: int, most: int) -> tuple[str, ...]:
            return await asyncio.to_thread(reader.ended_episodes, writer.engine, run_id, most)

        payload_store = PayloadStore(self.payload_bytes)
        router = Router(
            LIMITS, writer.generation, payload_store, writer.granted.timeline, writer.granted.restored
        )
        pair = keys.read_keypair(keys.server_key_path(self.state_dir))
        self.server = RouterServer(
            router,
            writer,
            self.keyring,
            pair,
            time.time,
            history,
            payload_store,
            payloads,
            read_ended_episodes=ended_episodes,
        )
        try:
            snapshot = reader.read_snapshot(writer.engine)
            port = self._port = self.server.bind("127.0.0.1", self._port)
            self.server.perform(router.restore(snapshot, time.time()))
            here = keys.Rendezvous(
                f"tcp://127.0.0.1:{port}",
                pair.public,
                writer.generation,
                os.getpid(),
                socket.gethostname(),
                writer.granted.uid,
            )
            keys.write_rendezvous(self.state_dir, here)
            ready.set()
            await self.server.run(self._stop)
        except Fenced:  # the writer told, before the stop that follows was heard
            self.fenced.set()
        except BaseException as error:
            self.error = error
            if not self.may_fail:
                raise
        finally:
            await asyncio.to_thread(writer.close, self._drain)
            self.server.close()

    def query(self, sql: str, **params: object) -> list[tuple[object, ...]]:
        """Ask the ledger."""
        from scavenger.ledger.store import open_engine

        engine = open_engine(self.url)
        try:
            return list(reader.rows(engine, sql, params).rows)
        finally:
            engine.dispose()

    def worker_key(self, intent: str, run: str = "r") -> keys.KeyPair:
        pair = keys.generate(run, intent)
        self.keyring.allow(pair.public, PeerIdentity("worker", pair.public, run, intent))
        return pair


class Peer:
    """A DEALER under CURVE that says what it is told to."""

    def __init__(self, state_dir: Path, pair: keys.KeyPair) -> None:
        self._state_dir, self._pair = state_dir, pair
        self._context = zmq.Context()
        self.socket = self._open()
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )

    def _open(self) -> zmq.Socket[bytes]:
        rendezvous = keys.read_rendezvous(self._state_dir)
        made = self._context.socket(zmq.DEALER)
        keys.secure(made, rendezvous.server_key, self._pair)
        made.linger = 0
        made.sndtimeo = (
            20_000  # a refused key's message is taken by nobody: an error then, not a wait for ever
        )
        made.connect(rendezvous.endpoint)
        return made

    def reconnect(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=0)
        self.socket = self._open()
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, message: messages.Message | bytes) -> None:
        self.socket.send(message if isinstance(message, bytes) else messages.encode(message))

    def hear(self, timeout_s: float = 30.0) -> messages.ToWorker | None:
        return (
            messages.decode_to_worker(self.socket.recv()) if self.socket.poll(int(timeout_s * 1000)) else None
        )

    def hear_trainer(self, timeout_s: float = 30.0) -> messages.ToTrainer | None:
        return (
            messages.decode_to_trainer(self.socket.recv())
            if self.socket.poll(int(timeout_s * 1000))
            else None
        )

    def await_kind(self, kind: type, timeout_s: float = 60.0) -> Any:
        """The next message of a kind."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self.hear(left)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")


def hello(session: str, node: str = "n", **change: object) -> messages.WorkerHello:
    values = {
        "protocol": messages.PROTOCOL,
        "kind": "harvested",
        "run": "r",
        "session": session,
        "incarnation": 0,
        "job_id": 1,
        "node": node,
        "gpus": 1,
        "engine": "reference",
        "code_version": "0",
        "pid": 1,
    }
    return messages.WorkerHello(**(values | change))  # type: ignore[arg-type]


class ScriptedWorker(threading.Thread):
    """Generates the harness's tokens, `pace` a chunk of 2 every so many seconds; registers again whenever the daemon falls silent."""

    def __init__(
        self, state_dir: Path, pair: keys.KeyPair, session: str, pace: float = 0.01, run: str = "r"
    ) -> None:
        super().__init__(name=session)
        self._of = run
        self.ledger = ""
        self._dir, self._pair, self._session, self._pace = state_dir, pair, session, pace
        self.halt = threading.Event()
        self.error: BaseException | None = None
        self.leases: dict[int, tuple[messages.Lease, int]] = {}
        self.acked: dict[int, int] = {}
        self.loaded = -1
        self.registered = False

    def run(self) -> None:
        try:
            with Peer(self._dir, self._pair) as peer:
                self._serve(peer)
        except BaseException as error:
            self.error = error
            raise

    def _serve(self, peer: Peer) -> None:
        heard = said = time.monotonic()
        self._register(peer)
        while not self.halt.is_set():
            message = peer.hear(self._pace)
            now = time.monotonic()
            if message is not None:
                heard = now
                self._take(peer, message)
                continue
            if now - heard > 1.5:
                peer.reconnect()
                self._register(peer)
                heard = now
            elif self.registered:
                if now - said > LIMITS.heartbeat_s:
                    said = now
                    held = tuple(
                        messages.Held(i, lease.epoch, length) for i, (lease, length) in self.leases.items()
                    )
                    peer.say(messages.Heartbeat(held, 0, self.loaded))
                self._generate(peer)

    def _register(self, peer: Peer) -> None:
        self.registered = False
        held = tuple(messages.Held(i, lease.epoch, length) for i, (lease, length) in self.leases.items())
        loaded: dict[str, Any] = {"loaded_version": self.loaded, "loaded_root": b"root-%d" % self.loaded}
        peer.say(hello(self._session, run=self._of, held=held, ledger=self.ledger, **loaded))

    def _generate(self, peer: Peer) -> None:
        chunks = []
        for i, (lease, length) in list(self.leases.items()):
            start = min(length, self.acked.get(i, length))
            stop = min(length + 2, lease.sampling.max_tokens)
            if stop > start:
                finish = "length" if stop == lease.sampling.max_tokens else None
                chunks.append(
                    messages.Chunk(
                        i,
                        lease.epoch,
                        start,
                        lease.version,
                        *payload(i, start, stop - start)[:3],
                        finish=finish,
                    )
                )
                self.leases[i] = (lease, stop)
        if chunks:
            peer.say(messages.Chunks(tuple(chunks)))

    def _take(self, peer: Peer, message: messages.ToWorker) -> None:
        match message:
            case messages.Welcome(ledger=ledger):
                if self.ledger not in ("", ledger):
                    self.leases, self.acked, self.loaded = {}, {}, -1
                self.registered, self.ledger = True, ledger
            case messages.HelloAgain():
                self._register(peer)
            case messages.UseWeights(version=version):
                self.loaded = version
                peer.say(messages.WeightsLoaded(version, b"root-%d" % version))
            case messages.Assign(leases=leases):
                for lease in leases:
                    length = len(lease.accepted) // 4
                    self.leases[lease.sample_id] = (lease, length)
                    self.acked[lease.sample_id] = length
            case messages.Revoke(leases=leases):
                for sample_id, epoch in leases:
                    if sample_id in self.leases and self.leases[sample_id][0].epoch == epoch:
                        del self.leases[sample_id]
            case messages.Ack(durable=durable):
                for held in durable:
                    self.acked[held.sample_id] = max(held.length, self.acked.get(held.sample_id, 0))
                    mine = self.leases.get(held.sample_id)
                    if mine is not None and held.length >= mine[0].sampling.max_tokens:
                        del self.leases[held.sample_id]
