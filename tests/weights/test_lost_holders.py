"""Holders that are killed, silent, slow, stuck or wrong: a pull goes on with the others, or says what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from scavenger.errors import WeightsError
from scavenger.protocol import messages
from scavenger.weights import protocol
from scavenger.weights.channel import SharedContext, ZmqChannel
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer, MemoryPool
from scavenger.weights.protocol import (
    TOKEN_NBYTES,
    AvailableChunks,
    ChunkPart,
    NoSuch,
    decode_request,
    encode,
)
from scavenger.weights.pull import Pull
from scavenger.weights.source import WeightServer
from scavenger.weights.spool import Spool
from scavenger.weights.transfer import TransferLimits
from tests.weights.cut import Cut
from tests.weights.pulling import ME, QUICK, get, parts_sent, version


class Faulty:
    """A holder on plain TCP that serves `parts` chunks and then is silent, ends, or ends within a chunk. One that "claims" says that it has
    one chunk, each time another, that all others are on their way to it, and does not have what it is asked for. One that "keeps" says
    as often as it is asked that it has every chunk, and never sends any.
    """

    def __init__(
        self, blob: memoryview, manifest: Manifest, parts: int, how: str, slow_s: float = 0.0
    ) -> None:
        self._blob, self._manifest, self._parts, self._how, self._slow_s = blob, manifest, parts, how, slow_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = messages.WeightSource(
            f"tcp://127.0.0.1:{self._server.getsockname()[1]}", "", bytes(TOKEN_NBYTES)
        )
        self.served = self.told = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(10)
                self._talk(sock)
            if self._how == "killed" and self.served >= self._parts:
                self._server.close()
                return

    def _talk(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self._done.is_set():
                head = sock.recv(4, socket.MSG_WAITALL)
                if len(head) < 4:
                    return
                request = decode_request(sock.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
                if self._how == "keeps":
                    if not isinstance(request, protocol.Get):
                        self.told += 1
                        chunks = len(self._manifest.chunk_hashes)
                        bitmap = (2**chunks - 1).to_bytes(-(-chunks // 8), "little")
                        send(sock, AvailableChunks(request.version, False, bitmap))
                    continue
                if self._how == "claims":
                    send(sock, self._claim(request))
                    continue
                if not isinstance(request, protocol.Get):
                    send(sock, AvailableChunks(request.version, complete=True))
                    continue
                start, stop = self._manifest.chunk_range(request.chunk)
                if self.served >= self._parts:
                    if self._how == "silent":
                        self._done.wait(20)
                    elif self._how == "truncated":
                        send(sock, ChunkPart(request.version, request.chunk, stop - start))
                        sock.sendall(self._blob[start : (start + stop) // 2])
                    elif self._how == "short":
                        send(sock, ChunkPart(request.version, request.chunk, 8))
                        sock.sendall(self._blob[start : start + 8])
                        continue
                    return
                self._done.wait(self._slow_s)
                send(sock, ChunkPart(request.version, request.chunk, stop - start))
                sock.sendall(self._blob[start:stop])
                self.served += 1

    def _claim(self, request: protocol.SourceRequest) -> AvailableChunks | NoSuch:
        if isinstance(request, protocol.Get):
            return NoSuch(request.version, request.chunk, "not yet", absent=True)
        self.told += 1
        size = -(-len(self._manifest.chunk_hashes) // 8)
        bitmap = (1 << self.told % 2).to_bytes(size, "little")
        return AvailableChunks(request.version, False, bitmap, b"\xff" * size)

    def __enter__(self) -> Faulty:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._done.set()
        with contextlib.suppress(OSError):  # closed already
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


def send(sock: socket.socket, reply: ChunkPart | AvailableChunks | NoSuch) -> None:
    frame = encode(reply)
    sock.sendall(len(frame).to_bytes(4, "little") + frame)


@pytest.mark.parametrize("how", ["killed", "silent", "truncated", "short"])
def test_a_holder_lost_midway_is_replaced_by_another(tcp: WeightServer, how: str) -> None:
    manifest, blob = version(1)
    with Faulty(blob, manifest, 10, how) as lost:
        assert get(manifest, lost.address, tcp.publish(manifest, blob)) == blob


@pytest.mark.parametrize("seed", range(12))
def test_a_holder_killed_at_any_byte_is_replaced_by_another_and_what_came_of_it_stays(
    source: WeightServer, seed: int
) -> None:
    """Any: within a handshake, a length, a message or a chunk. It has the pull for itself until then."""
    manifest, blob = version(1)
    at = random.Random(seed).choice([seed * 7, random.Random(seed).randrange(len(blob))])
    work = Pull(manifest, ME, limits=QUICK)

    async def main(lost: Cut, other: messages.WeightSource) -> None:
        work.offer([lost.address])
        waiting = asyncio.create_task(work.finish(20.0))
        async with asyncio.timeout(20.0):
            while not lost.gone:
                await asyncio.sleep(0.005)  # polls a condition
        assert not waiting.done(), "nothing is given out before all of it is here"
        work.offer([other])
        await waiting

    with (
        WeightServer(encrypt=bool(source.server_key), local=False) as dying,
        Cut(dying.publish(manifest, blob), at) as lost,
    ):
        asyncio.run(main(lost, source.publish(manifest, blob)))
        assert dying.stats.parts > 0 or at < 1024
    assert work.buffer.view == blob
    assert work.transfer.corrupt == 0
    kept = sum(holder.chunks for holder in work.transfer.holders if holder.source == 0)
    start, stop = manifest.chunk_range(len(manifest.chunk_hashes) - 1)  # the last chunk may be a short one
    assert kept <= (at + manifest.chunk_nbytes - (stop - start)) // manifest.chunk_nbytes
    assert source.stats.parts <= len(manifest.chunk_hashes) - kept + QUICK.window * QUICK.streams, (
        "of chunks in flight twice"
    )


def test_a_holder_lost_midway_without_another_is_an_error_that_counts() -> None:
    manifest, blob = version(1)
    with (
        Faulty(blob, manifest, 10, "killed") as lost,
        pytest.raises(
            WeightsError, match=rf"\b([1-9]|10) of {len(manifest.chunk_hashes)} chunks arrived.*refused"
        ),
    ):
        get(manifest, lost.address, deadline_s=1.0)


def test_what_arrived_is_not_fetched_again_when_a_pull_goes_on(tcp: WeightServer) -> None:
    manifest, blob = version(1)
    work = Pull(manifest, ME, limits=QUICK)
    missing: list[int] = []

    async def twice() -> None:
        with Faulty(blob, manifest, 10, "killed") as lost:
            work.offer([lost.address])
            with pytest.raises(WeightsError, match="chunks arrived"):
                await work.finish(0.8)
        missing.append(work.transfer.missing)
        work.again()
        work.offer([tcp.publish(manifest, blob)])
        await work.finish(10.0)

    asyncio.run(twice())
    assert work.buffer.view == blob
    assert parts_sent(tcp, missing[0]) == missing[0] < len(manifest.chunk_hashes)


def test_a_holder_that_comes_later_takes_part(tcp: WeightServer) -> None:
    manifest, blob = version(1)
    address = tcp.publish(manifest, blob)

    async def late() -> Buffer:
        with Faulty(blob, manifest, 3, "silent") as lost:
            work = Pull(manifest, ME, limits=QUICK)
            work.offer([lost.address])
            waiting = asyncio.create_task(work.finish(10.0))
            while lost.served < 3:
                await asyncio.sleep(0.01)
            work.offer([lost.address, address])
            return await waiting

    assert asyncio.run(late()).view == blob


@pytest.mark.parametrize(("how", "chunks"), [("claims", 74), ("keeps", 2)])
def test_a_holder_that_claims_what_it_does_not_deliver_keeps_no_pull_from_the_publisher(
    tcp: WeightServer, how: str, chunks: int
) -> None:
    manifest, blob = version(1, nbytes=chunks * 4096)
    address = tcp.publish(manifest, blob)

    async def late() -> Buffer:
        with Faulty(blob, manifest, 0, how) as liar:
            work = Pull(manifest, ME, limits=QUICK)
            work.offer([liar.address])
            waiting = asyncio.create_task(work.finish(5.0))
            while liar.told < 2:
                await asyncio.sleep(0.01)  # polls a condition
            work.offer([liar.address, address])
            return await waiting

    assert asyncio.run(late()).view == blob


def test_a_holder_at_one_hundredth_of_the_speed_delays_nothing(tcp: WeightServer) -> None:
    manifest, blob = version(1, nbytes=4 << 20, chunk_nbytes=1 << 14)
    limits = TransferLimits(stall_s=120.0)  # nobody gives the slow one up
    with Faulty(blob, manifest, 10_000, "", slow_s=60.0) as slow:  # before its first chunk comes
        assert get(manifest, slow.address, tcp.publish(manifest, blob), limits=limits) == blob
        assert slow.served == 0, "it was not waited for"


def test_memory_overwritten_during_a_read_is_noticed(tcp: WeightServer) -> None:
    manifest, blob = version(1, nbytes=1 << 20)
    buffer = Buffer(len(blob))
    buffer.view[:] = blob
    address = tcp.publish(manifest, buffer)
    work = Pull(manifest, ME, limits=QUICK, seed=1)

    def spoil(chunk: int) -> None:
        buffer.view[:] = bytes(len(blob))

    work.arrived = spoil
    work.offer([address])
    with pytest.raises(WeightsError, match="does not have the manifest's hash"):
        asyncio.run(work.finish(10.0))


def test_a_receiver_that_vanishes_leaves_nothing_with_the_holder(tcp: WeightServer) -> None:
    manifest, blob = version(1, nbytes=1 << 22, chunk_nbytes=1 << 16)
    address = tcp.publish(manifest, blob)
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as gone:
        for chunk in range(64):
            frame = protocol.get(address.token, 1, chunk)
            gone.sendall(len(frame).to_bytes(4, "little") + frame)
        assert gone.recv(1)
        tcp.retire(1)
        assert not tcp.free(1, 0.05)  # it reads, so the memory is not to be written
    assert tcp.free(1, 5.0)


class Stuck:
    """Stands in for `os.preadv` on a filesystem that is gone: a read does not end before it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reading, self.let_go = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self.threads.append(threading.current_thread())
        self.reading.set()
        assert self.let_go.wait(30.0)
        return self._preadv(fd, buffers, offset)

    def end(self) -> None:
        self.let_go.set()
        for thread in self.threads:
            thread.join(5.0)
            assert not thread.is_alive()


def test_a_read_that_never_ends_holds_up_neither_the_loop_nor_the_pull(
    tcp: WeightServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, blob = version(1)
    disk = Spool(tmp_path).write(manifest, blob)
    stuck = Stuck(monkeypatch)
    work, pool = Pull(manifest, ME, limits=QUICK), MemoryPool()
    lags = []

    async def main() -> None:
        async def watch() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                lags.append(time.monotonic() - before)

        watching = asyncio.create_task(watch())
        work.offer([disk])
        assert await asyncio.to_thread(stuck.reading.wait, 5.0)
        work.offer(
            [
                messages.WeightSource(
                    tcp.publish(manifest, blob).endpoint, "", tcp.publish(manifest, blob).token
                )
            ]
        )
        await work.finish(20.0)
        watching.cancel()

    try:
        began = time.monotonic()
        asyncio.run(main())
        assert time.monotonic() - began < 10.0
        assert max(lags) < 0.8
        assert stuck.threads[0].is_alive()
        pool.put_back(work.buffer)
        assert pool.take(manifest.total_nbytes) is not work.buffer, "the one that is stuck may still write it"
    finally:
        stuck.end()
    assert work.buffer.view == blob


def test_a_pull_that_leaves_a_stuck_read_behind_leaves_no_context_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, blob = version(1)
    disk = Spool(tmp_path).write(manifest, blob)
    stuck, made = Stuck(monkeypatch), list[zmq.Context[zmq.Socket[bytes]]]()
    real = zmq.Context

    def context() -> zmq.Context[zmq.Socket[bytes]]:
        made.append(real())
        return made[-1]

    async def main(address: messages.WeightSource) -> None:
        work = Pull(manifest, ME, limits=QUICK)
        work.offer([disk])
        assert await asyncio.to_thread(stuck.reading.wait, 5.0)
        work.offer([address])
        await work.finish(20.0)

    try:
        with WeightServer(encrypt=True, local=False) as source:
            monkeypatch.setattr(zmq, "Context", context)
            asyncio.run(main(source.publish(manifest, blob)))
            assert made
            assert all(one.closed for one in made), "a collector would have to end it"
            assert stuck.threads[0].is_alive()
    finally:
        stuck.end()


def test_what_a_stuck_read_brings_later_does_not_count_in_the_next_try(
    tcp: WeightServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, blob = version(1)
    disk = Spool(tmp_path).write(manifest, blob)
    stuck = Stuck(monkeypatch)
    work = Pull(manifest, ME, limits=QUICK)

    async def main() -> None:
        work.offer([disk])
        with pytest.raises(WeightsError, match="not complete"):
            await work.finish(0.2)
        work.again()
        await asyncio.to_thread(stuck.end)
        assert not work.transfer.here.any()
        assert work.transfer.missing == len(manifest.chunk_hashes)
        work.offer([tcp.publish(manifest, blob)])
        await work.finish(10.0)

    try:
        asyncio.run(main())
    finally:
        stuck.end()
    assert work.buffer.view == blob


def test_a_curve_holder_that_takes_no_requests_is_an_error_and_no_wait() -> None:
    """As where it refuses this key: here nobody listens, so that they fill the queue."""
    with socket.create_server(("127.0.0.1", 0)) as closing:
        port = closing.getsockname()[1]
    nobody = messages.WeightSource(f"tcp://127.0.0.1:{port}", ME.public, bytes(TOKEN_NBYTES))
    channel = ZmqChannel(nobody, 1, ME, SharedContext(), chunk_nbytes=1024)

    def fill() -> None:
        for _ in range(10_000):
            channel.ask_have()

    try:
        with pytest.raises(ConnectionRefusedError, match="takes no requests"):
            fill()
    finally:
        channel.end()
