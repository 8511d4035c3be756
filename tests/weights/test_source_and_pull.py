"""Pulling a version over real sockets: complete and verified, or an error with its reason."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq
from structlog.testing import capture_logs

from scavenger import keys, wire
from scavenger.errors import WeightsError
from scavenger.weights import manifest as manifests
from scavenger.weights import protocol, source_zmq
from scavenger.weights import source as sources
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer, Pool
from scavenger.weights.protocol import TOKEN_NBYTES, Holds, NoSuch, Part, decode_answer, decode_request, encode
from scavenger.weights.pull import Pull, pull
from scavenger.weights.shelf import Shelf
from scavenger.weights.source import WeightSource
from scavenger.weights.source_zmq import SEND_QUEUE
from scavenger.weights.spool import Spool
from scavenger.weights.transfer import Limits
from tests.weights.cut import Cut

QUICK = Limits(window=4, stall_s=0.3, backoff_s=0.01, backoff_max_s=0.05)
ME = keys.generate()


def version(number: int, nbytes: int = 300_000, chunk_nbytes: int = 4096) -> tuple[Manifest, memoryview]:
    data = os.urandom(nbytes // 8 * 8)
    half = len(data) // 8 * 4
    tensors = {
        "a": ("float32", (half // 4,), memoryview(data)[:half]),
        "b": ("bfloat16", ((len(data) - half) // 2,), memoryview(data)[half:]),
    }
    return manifests.build(number, tensors, chunk_nbytes=chunk_nbytes)


@pytest.fixture(params=["tcp", "curve"])
def source(request: pytest.FixtureRequest) -> Iterator[WeightSource]:
    with WeightSource(encrypt=request.param == "curve") as made:
        yield made


@pytest.fixture
def tcp() -> Iterator[WeightSource]:
    with WeightSource() as made:
        yield made


def get(manifest: Manifest, *sources: wire.WeightSource, deadline_s: float = 10.0, limits: Limits = QUICK) -> memoryview:
    return asyncio.run(pull(manifest, sources, ME, deadline_s, limits=limits)).view


def test_a_pulled_version_is_the_published_one(source: WeightSource) -> None:
    manifest, blob = version(1)
    assert get(manifest, source.publish(manifest, blob)) == blob
    assert source.stats.parts == len(manifest.chunk_hashes)


def test_a_version_without_bytes_needs_no_source() -> None:
    manifest, _ = manifests.build(1, {})
    assert get(manifest) == b""


def test_several_receivers_pull_at_once(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)

    async def all_of_them() -> list[Buffer]:
        return await asyncio.gather(*(pull(manifest, [address], keys.generate(), 10.0) for _ in range(5)))

    assert [buffer.view for buffer in asyncio.run(all_of_them())] == [blob] * 5


def test_an_older_version_is_served_until_two_newer_ones_are_published(source: WeightSource) -> None:
    published = [(m, b, source.publish(m, b)) for m, b in (version(1), version(2))]
    for manifest, blob, address in published:
        assert get(manifest, address) == blob
    source.publish(*version(3))
    with pytest.raises(WeightsError, match="not served here"):
        get(published[0][0], published[0][2])
    assert get(published[1][0], published[1][2]) == published[1][1]


def test_a_retired_version_is_refused(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    source.retire(1)
    with pytest.raises(WeightsError, match="version 1 is not served here"):
        get(manifest, address)


def test_a_wrong_token_is_refused(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    with pytest.raises(WeightsError, match="under this token"):
        get(manifest, wire.WeightSource(address.endpoint, address.server_key, bytes(TOKEN_NBYTES)))
    assert source.stats.parts == 0
    assert source.stats.refused > 0


def test_publishing_a_version_again_needs_the_same_weights(source: WeightSource) -> None:
    manifest, blob = version(1)
    assert source.publish(manifest, blob) == source.publish(manifest, blob)
    with pytest.raises(WeightsError, match="published with other weights"):
        source.publish(*version(1))


def test_a_flipped_byte_is_never_returned(source: WeightSource) -> None:
    manifest, blob = version(1)
    rotten = bytearray(blob)
    rotten[100_000] ^= 1
    with pytest.raises(WeightsError, match="does not have the manifest's hash"):
        get(manifest, source.publish(manifest, rotten))


def test_a_source_with_a_flipped_byte_is_outvoted_by_an_honest_one(source: WeightSource) -> None:
    manifest, blob = version(1)
    rotten = bytearray(blob)
    for i in range(0, len(rotten), 5000):
        rotten[i] ^= 1
    with WeightSource() as liar:
        assert get(manifest, liar.publish(manifest, rotten), source.publish(manifest, blob)) == blob


def test_nobody_listening_is_an_error_at_the_deadline(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    source.close()
    with pytest.raises(WeightsError, match=r"not complete after 1 s: 0 of \d+ chunks"):
        get(manifest, address, deadline_s=1.0)


def test_a_source_that_cannot_be_addressed_does_not_stop_the_others(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    assert get(manifest, wire.WeightSource("tcp://", address.server_key, address.token), address) == blob
    nobody = wire.WeightSource("tcp://127.0.0.1:1", address.server_key, address.token)
    assert get(manifest, nobody, address) == blob


@pytest.mark.parametrize("key", ["x", "ä" * 40, "~" * 40])
def test_a_key_that_is_none_costs_its_holder_and_leaves_no_context_behind(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """An engine's word is passed on: what it says its key is may be anything."""
    manifest, blob = version(1)
    made, real = list[zmq.Context[zmq.Socket[bytes]]](), zmq.Context

    def context() -> zmq.Context[zmq.Socket[bytes]]:
        made.append(real())
        return made[-1]

    with WeightSource(encrypt=True) as source:
        address = source.publish(manifest, blob)
        monkeypatch.setattr(zmq, "Context", context)
        wrong = wire.WeightSource(address.endpoint, key, address.token)
        assert get(manifest, wrong, address) == blob
        with pytest.raises(WeightsError, match="cannot be used"):
            get(manifest, wrong, deadline_s=0.5)
    assert made
    assert all(one.closed for one in made)


RACE = """
import os, threading, time
import zmq
from zmq.utils import garbage

if ours := {ours}:
    import scavenger.weights.source_zmq
made, real, run = [], zmq.Context, garbage.GarbageCollectorThread.run

def until(count):
    deadline = time.monotonic() + 30.0
    while not ours and len(made) < count and time.monotonic() < deadline:
        time.sleep(0.001)

class Slow(real):
    def __init__(self, *args, **kwargs):
        made.append(self)
        until(2)
        super().__init__(*args, **kwargs)

def later(self):
    until(1)
    run(self)

def sends(number):
    with real() as context, context.socket(zmq.PUSH) as a, context.socket(zmq.PULL) as b:
        a.bind(f"inproc://{{number}}")
        b.connect(f"inproc://{{number}}")
        a.send(bytes(100_000), copy=False)
        b.recv(copy=False)

garbage.zmq.Context, garbage.GarbageCollectorThread.run = Slow, later
threads = [threading.Thread(target=sends, args=(number,)) for number in range(2)]
threads[0].start()
while garbage.gc.thread is None or not garbage.gc.thread.is_alive():
    time.sleep(0.001)
threads[1].start()
for thread in threads:
    thread.join()
print(len(made), flush=True)
os._exit(0)  # with two, pyzmq waits at the exit for the one that nobody reaches any more
"""


def test_two_threads_that_send_first_make_no_two_collectors_of_sent_memory() -> None:
    """pyzmq's own are made where they are first asked for; without ours the same program makes two."""
    for ours, made in ((False, "2"), (True, "0")):
        done = subprocess.run([sys.executable, "-c", RACE.format(ours=ours)], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == made


def test_an_interface_that_this_host_does_not_have_is_refused_with_the_key_to_set() -> None:
    for listen in ("192.0.2.1", "no such host"):
        with pytest.raises(WeightsError, match=r"set weights\.listen"):
            WeightSource(listen)


class Faulty:
    """A holder on plain TCP that serves `parts` chunks and then is silent, ends, or ends within a chunk."""

    def __init__(self, blob: memoryview, manifest: Manifest, parts: int, how: str, slow_s: float = 0.0) -> None:
        self._blob, self._manifest, self._parts, self._how, self._slow_s = blob, manifest, parts, how, slow_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = wire.WeightSource(f"tcp://127.0.0.1:{self._server.getsockname()[1]}", "", bytes(TOKEN_NBYTES))
        self.served = 0
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
                if not isinstance(request, protocol.Get):
                    send(sock, Holds(request.version, complete=True))
                    continue
                start, stop = self._manifest.chunk_range(request.chunk)
                if self.served >= self._parts:
                    if self._how == "silent":
                        self._done.wait(20)
                    elif self._how == "truncated":
                        send(sock, Part(request.version, request.chunk, stop - start))
                        sock.sendall(self._blob[start : (start + stop) // 2])
                    elif self._how == "short":
                        send(sock, Part(request.version, request.chunk, 8))
                        sock.sendall(self._blob[start : start + 8])
                        continue
                    return
                self._done.wait(self._slow_s)
                send(sock, Part(request.version, request.chunk, stop - start))
                sock.sendall(self._blob[start:stop])
                self.served += 1

    def __enter__(self) -> Faulty:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._done.set()
        with contextlib.suppress(OSError):  # closed already
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


def send(sock: socket.socket, answer: Part | Holds) -> None:
    frame = encode(answer)
    sock.sendall(len(frame).to_bytes(4, "little") + frame)


@pytest.mark.parametrize("how", ["killed", "silent", "truncated", "short"])
def test_a_holder_lost_midway_is_replaced_by_another(tcp: WeightSource, how: str) -> None:
    manifest, blob = version(1)
    with Faulty(blob, manifest, 10, how) as lost:
        assert get(manifest, lost.address, tcp.publish(manifest, blob)) == blob


@pytest.mark.parametrize("seed", range(12))
def test_a_holder_killed_at_any_byte_is_replaced_by_another_and_what_came_of_it_stays(source: WeightSource, seed: int) -> None:
    """Any: within a handshake, a length, a message or a chunk. It has the pull for itself until then."""
    manifest, blob = version(1)
    at = random.Random(seed).choice([seed * 7, random.Random(seed).randrange(len(blob))])
    work = Pull(manifest, ME, limits=QUICK)

    async def main(lost: Cut, other: wire.WeightSource) -> None:
        work.offer([lost.address])
        waiting = asyncio.create_task(work.finish(20.0))
        async with asyncio.timeout(20.0):
            while not lost.gone:
                await asyncio.sleep(0.005)  # polls a condition
        assert not waiting.done(), "nothing is given out before all of it is here"
        work.offer([other])
        await waiting

    with WeightSource(encrypt=bool(source.server_key), local=False) as dying, Cut(dying.publish(manifest, blob), at) as lost:
        asyncio.run(main(lost, source.publish(manifest, blob)))
        assert dying.stats.parts > 0 or at < 1024
    assert work.buffer.view == blob
    assert work.transfer.corrupt == 0
    kept = sum(holder.chunks for holder in work.transfer.holders if holder.source == 0)
    assert kept <= at // manifest.chunk_nbytes
    assert source.stats.parts <= len(manifest.chunk_hashes) - kept + QUICK.window * QUICK.streams, "of chunks in flight twice"


def test_a_holder_lost_midway_without_another_is_an_error_that_counts() -> None:
    manifest, blob = version(1)
    with (
        Faulty(blob, manifest, 10, "killed") as lost,
        pytest.raises(WeightsError, match=rf"\b([1-9]|10) of {len(manifest.chunk_hashes)} chunks arrived.*refused"),
    ):
        get(manifest, lost.address, deadline_s=1.0)


def test_what_arrived_is_not_fetched_again_when_a_pull_goes_on(tcp: WeightSource) -> None:
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
    assert tcp.stats.parts == missing[0] < len(manifest.chunk_hashes)


def test_a_holder_that_comes_later_takes_part(tcp: WeightSource) -> None:
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


def test_a_holder_at_one_hundredth_of_the_speed_delays_nothing(tcp: WeightSource) -> None:
    manifest, blob = version(1, nbytes=4 << 20, chunk_nbytes=1 << 14)
    with Faulty(blob, manifest, 10_000, "", slow_s=2.0) as slow:  # its first chunk alone takes longer than all of the other's
        began = time.monotonic()
        assert get(manifest, slow.address, tcp.publish(manifest, blob), limits=Limits(stall_s=10.0)) == blob
        assert time.monotonic() - began < 1.9
        assert slow.served == 0


def test_memory_overwritten_during_a_read_is_noticed(tcp: WeightSource) -> None:
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


def test_a_receiver_that_vanishes_leaves_nothing_with_the_holder(tcp: WeightSource) -> None:
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


def test_a_neighbour_is_handed_the_memory_and_checks_it_all_the_same(tcp: WeightSource) -> None:
    manifest, blob = version(1)
    buffer = Buffer(len(blob))
    buffer.view[:] = blob
    address = tcp.publish(manifest, buffer)
    assert get(manifest, address) == blob
    assert tcp.stats.mapped > 0
    assert tcp.stats.parts == 0
    buffer.view[5000] ^= 1
    with pytest.raises(WeightsError, match="does not have the manifest's hash"):
        get(manifest, address)
    elsewhere = wire.WeightSource(address.endpoint, "", address.token, "another-machine:x")
    buffer.view[5000] ^= 1
    assert get(manifest, elsewhere) == blob
    assert tcp.stats.parts == len(manifest.chunk_hashes)


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
    tcp: WeightSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, blob = version(1)
    disk = Spool(tmp_path).write(manifest, blob)
    stuck = Stuck(monkeypatch)
    work, pool = Pull(manifest, ME, limits=QUICK), Pool()
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
        work.offer([wire.WeightSource(tcp.publish(manifest, blob).endpoint, "", tcp.publish(manifest, blob).token)])
        await work.finish(20.0)
        watching.cancel()

    try:
        began = time.monotonic()
        asyncio.run(main())
        assert time.monotonic() - began < 10.0
        assert max(lags) < 0.8
        assert stuck.threads[0].is_alive()
        pool.give(work.buffer)
        assert pool.take(manifest.total_nbytes) is not work.buffer, "the one that is stuck may still write it"
    finally:
        stuck.end()
    assert work.buffer.view == blob


def test_a_pull_that_leaves_a_stuck_read_behind_leaves_no_context_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, blob = version(1)
    disk = Spool(tmp_path).write(manifest, blob)
    stuck, made = Stuck(monkeypatch), list[zmq.Context[zmq.Socket[bytes]]]()
    real = zmq.Context

    def context() -> zmq.Context[zmq.Socket[bytes]]:
        made.append(real())
        return made[-1]

    async def main(address: wire.WeightSource) -> None:
        work = Pull(manifest, ME, limits=QUICK)
        work.offer([disk])
        assert await asyncio.to_thread(stuck.reading.wait, 5.0)
        work.offer([address])
        await work.finish(20.0)

    try:
        with WeightSource(encrypt=True, local=False) as source:
            monkeypatch.setattr(zmq, "Context", context)
            asyncio.run(main(source.publish(manifest, blob)))
            assert made
            assert all(one.closed for one in made), "a collector would have to end it"
            assert stuck.threads[0].is_alive()
    finally:
        stuck.end()


def test_what_a_stuck_read_brings_later_does_not_count_in_the_next_try(
    tcp: WeightSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_neighbour_without_the_token_gets_no_memory(tcp: WeightSource) -> None:
    manifest, blob = version(1)
    buffer = Buffer(len(blob))
    address = tcp.publish(manifest, buffer)
    with pytest.raises(WeightsError, match="under this token"):
        get(manifest, wire.WeightSource(address.endpoint, "", bytes(TOKEN_NBYTES), address.local))
    assert tcp.stats.mapped == 0


def test_receivers_serve_each_other_while_they_pull(tcp: WeightSource) -> None:
    """Two receivers of a slow publisher: each chunk leaves the publisher about once."""
    manifest, blob = version(1, nbytes=1 << 20, chunk_nbytes=1 << 13)
    count = len(manifest.chunk_hashes)

    async def both() -> tuple[Buffer, Buffer]:
        with WeightSource(local=False) as first, WeightSource(local=False) as second:
            works = [Pull(manifest, ME, limits=QUICK, seed=seed) for seed in (1, 2)]
            held = [one.publish_empty(manifest, work.buffer) for one, work in zip((first, second), works, strict=True)]
            works[0].arrived = lambda chunk: first.arrived(1, chunk)
            works[1].arrived = lambda chunk: second.arrived(1, chunk)
            works[0].offer([publisher, held[1]])
            works[1].offer([publisher, held[0]])
            return tuple(await asyncio.gather(*(work.finish(20.0) for work in works)))  # type: ignore[return-value]

    with WeightSource(local=False, nbytes_per_s=1 << 20) as slow:
        publisher = slow.publish(manifest, blob)
        one, two = asyncio.run(both())
        assert one.view == two.view == blob
        assert slow.stats.parts < 1.5 * count


def test_garbage_is_counted_and_a_stalled_receiver_holds_nobody_up(source: WeightSource) -> None:
    manifest, blob = version(1, nbytes=1 << 22, chunk_nbytes=1 << 16)
    address = source.publish(manifest, blob)
    if not address.server_key:
        host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as staller, socket.create_connection((host, int(port))) as fool:
            fool.sendall((5).to_bytes(4, "little") + b"hello")
            assert fool.recv(1) == b""
            for chunk in range(len(manifest.chunk_hashes)):
                frame = protocol.get(address.token, 1, chunk)
                staller.sendall(len(frame).to_bytes(4, "little") + frame)
            assert get(manifest, address) == blob
            assert source.stats.malformed == 1
        return
    context = zmq.Context()
    staller_zmq = dealer(context, address)
    staller_zmq.setsockopt(zmq.RCVHWM, 1)
    staller_zmq.setsockopt(zmq.RCVBUF, 4096)
    staller_zmq.connect(address.endpoint)
    try:
        staller_zmq.send(b"not a request")
        staller_zmq.send_multipart([b"two", b"frames"])
        for _ in range(20):  # asks for 80 MB and reads none of it
            for chunk in range(len(manifest.chunk_hashes)):
                staller_zmq.send(protocol.get(address.token, 1, chunk))
        assert get(manifest, address) == blob
        stats = source.stats
        assert stats.malformed == 2
        assert stats.dropped > 0
        # What was queued for it, and what the kernel took, is all it could ever make us hold.
        assert stats.parts - len(manifest.chunk_hashes) < 20 * len(manifest.chunk_hashes)
        assert SEND_QUEUE * manifest.chunk_nbytes < 1 << 24
    finally:
        staller_zmq.close()
        context.term()


def connected(address: wire.WeightSource) -> socket.socket:
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), 5.0)


def prove(sock: socket.socket, address: wire.WeightSource) -> None:
    frame = protocol.have(address.token, 1)
    sock.sendall(len(frame).to_bytes(4, "little") + frame)
    size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
    assert isinstance(decode_answer(sock.recv(size, socket.MSG_WAITALL)), Holds)


def test_strangers_that_take_every_connection_keep_no_receiver_out(tcp: WeightSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_CONNECTIONS", 4)
    manifest, blob = version(1)
    address = tcp.publish(manifest, blob)
    with contextlib.ExitStack() as stack:
        known = stack.enter_context(connected(address))
        prove(known, address)
        for _ in range(12):
            stack.enter_context(connected(address))
        assert get(manifest, address) == blob
        assert tcp.stats.dropped > 0
        prove(known, address)  # who has proven itself is not the one that makes room


def test_a_network_full_of_receivers_leaves_room_for_the_neighbours(tcp: WeightSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_CONNECTIONS", 2)
    manifest, blob = version(1)
    buffer = Buffer(len(blob))
    buffer.view[:] = blob
    address = tcp.publish(manifest, buffer)
    with connected(address) as one, connected(address) as two:
        prove(one, address)
        prove(two, address)
        with connected(address) as third:
            assert third.recv(1) == b"", "there is no room"
        assert get(manifest, address) == blob
        assert tcp.stats.mapped > 0


def drip(sock: socket.socket, piece: bytes, for_s: float) -> None:
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        sock.sendall(piece)
        time.sleep(0.02)  # the dripping itself is what is tested


def test_a_connection_that_proves_nothing_ends_however_it_drips(tcp: WeightSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "UNPROVEN_S", 0.5)
    manifest, blob = version(1)
    address = tcp.publish(manifest, blob)
    with connected(address) as known, connected(address) as silent, connected(address) as dripping, connected(address) as wrong:
        prove(known, address)
        dripping.sendall((500).to_bytes(4, "little"))
        guess = protocol.have(bytes(TOKEN_NBYTES), 1)
        for sock, piece in ((dripping, b"x"), (wrong, len(guess).to_bytes(4, "little") + guess)):
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                drip(sock, piece, 10.0)
        assert silent.recv(1) == b""
        prove(known, address)


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: wire.WeightSource) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.curve_serverkey = address.server_key.encode()
    made.curve_publickey, made.curve_secretkey = ME.public.encode(), ME.secret.encode()
    made.linger, made.rcvtimeo = 0, 5000
    return made


def test_a_chunk_outside_the_version_is_refused() -> None:
    manifest, blob = version(1)
    context = zmq.Context()
    with WeightSource(encrypt=True) as source:
        address = source.publish(manifest, blob)
        asking = dealer(context, address)
        asking.connect(address.endpoint)
        try:
            for chunk in (-1, len(manifest.chunk_hashes)):
                asking.send(protocol.get(address.token, 1, chunk))
                assert decode_answer(asking.recv()) == NoSuch(1, chunk, "the version has no such chunk")
        finally:
            asking.close()
            context.term()


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_request_that_meets_a_fault_of_ours_is_told_and_ends_nothing(encrypt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, faults = Shelf.answer, [RuntimeError("out of luck")]

    def broken(self: Shelf, *asked: Any) -> Any:
        if faults:
            raise faults.pop()
        return answer(self, *asked)

    monkeypatch.setattr(Shelf, "answer", broken)
    for module in (sources, source_zmq):
        monkeypatch.setattr(module, "_log", structlog.get_logger())
    manifest, blob = version(1)
    with capture_logs() as told, WeightSource(encrypt=encrypt, local=False) as source:
        assert get(manifest, source.publish(manifest, blob)) == blob, "the receiver asked again"
        assert source.stats.failed == 1
    (line,) = [entry for entry in told if entry["event"] == "weights.not_answered"]
    assert (line["reason"], line["log_level"]) == ("RuntimeError: out of luck", "error")


DEAF = """
import signal, sys, threading
from scavenger.weights.source import WeightSource

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as ranks of a trainer do
source = WeightSource(encrypt=True, local=False)
threading.Thread(target=source._curve._context.term, daemon=True).start()  # its `poll` fails from now on
threading.Event().wait()
"""


def test_a_curve_source_whose_socket_fails_ends_a_process_that_ignores_sigterm_and_says_why() -> None:
    """It cannot serve again, and its holders would go on naming it."""
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert "error: the encrypted weights source cannot serve any more: ContextTerminated" in done.stderr
    assert "remedy: start this process again" in done.stderr
    assert "weights.source_ended" in done.stdout + done.stderr


def test_a_curve_source_whose_socket_fails_tells_its_owner_and_publishes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_zmq, "_log", structlog.get_logger())

    def attempt(self: source_zmq.CurveServer, *_: object) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    monkeypatch.setattr(source_zmq.CurveServer, "_attempt", attempt)  # stands for a `recv` or `poll` that fails
    manifest, blob = version(1)
    context = zmq.Context()
    faults: queue.SimpleQueue[WeightsError] = queue.SimpleQueue()
    with capture_logs() as told, WeightSource(encrypt=True, local=False, on_fault=faults.put) as source:
        address = source.publish(manifest, blob)
        asking = dealer(context, address)
        asking.connect(address.endpoint)
        try:
            asking.send(protocol.get(address.token, 1, 0))
            fault = faults.get(timeout=10)
        finally:
            asking.close()
            context.term()
        assert "ZMQError: Socket operation on non-socket" in str(fault)
        with pytest.raises(WeightsError, match="cannot serve any more"):
            source.publish(*version(2))
    assert faults.empty(), "it is told once"
    assert [entry["log_level"] for entry in told if entry["event"] == "weights.source_ended"] == ["critical"]


class Unwilling:
    """A listening socket whose first accepts fail, as with too many open files."""

    def __init__(self, sock: socket.socket, failures: list[OSError]) -> None:
        self._sock, self.failures = sock, failures

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            raise self.failures.pop()
        return self._sock.accept()


def test_an_accept_that_fails_does_not_end_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "Software caused connection abort")]
    accept = WeightSource._accept
    monkeypatch.setattr(WeightSource, "_accept", lambda self, sock: accept(self, Unwilling(sock, failures)))  # type: ignore[arg-type]
    manifest, blob = version(1)
    with WeightSource(local=False) as source:
        assert get(manifest, source.publish(manifest, blob)) == blob
        assert not failures
        source.publish(*version(2))
    assert not any(thread.is_alive() for _, thread in source._listeners)


def test_a_connection_for_which_there_is_no_thread_does_not_end_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, []

    def begin(thread: threading.Thread) -> None:
        if thread.name.startswith("weights-serve-") and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    manifest, blob = version(1)
    with WeightSource(local=False) as source:
        assert get(manifest, source.publish(manifest, blob)) == blob
        assert len(refused) == 2
        assert source.stats.dropped == 2


def test_a_source_that_finds_no_thread_for_its_neighbours_leaves_no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        start(thread)
        begun.append(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    with pytest.raises(WeightsError, match="can't start new thread"):
        WeightSource()
    assert not begun[0].is_alive()
