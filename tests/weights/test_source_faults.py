"""What strangers, stalled receivers and faults of its own do to a source: it goes on serving, or ends and says why."""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import structlog
import zmq
from structlog.testing import capture_logs

from scavenger.errors import WeightsError
from scavenger.protocol import keys, messages
from scavenger.weights import channel, protocol, source_zmq
from scavenger.weights import source as sources
from scavenger.weights.memory import Buffer
from scavenger.weights.protocol import TOKEN_NBYTES, AvailableChunks, NoSuch, decode_reply
from scavenger.weights.source import WeightServer
from scavenger.weights.source_zmq import SEND_QUEUE
from scavenger.weights.version_store import VersionStore
from tests.weights.pulling import ME, get, version


def test_garbage_is_counted_and_a_stalled_receiver_holds_nobody_up(source: WeightServer) -> None:
    manifest, blob = version(1, nbytes=1 << 22, chunk_nbytes=1 << 16)
    address = source.publish(manifest, blob)
    if not address.server_key:
        host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
        with (
            socket.create_connection((host, int(port))) as staller,
            socket.create_connection((host, int(port))) as fool,
        ):
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


def test_a_receiver_that_reads_slower_than_is_of_use_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "SEND_S", 1.0)
    monkeypatch.setattr(channel, "LEAST_NBYTES_PER_S", 1e12)  # what its kernel takes for it earns nothing
    manifest, blob = version(1, nbytes=1 << 24, chunk_nbytes=1 << 24)
    with WeightServer(local=False) as source:
        address = source.publish(manifest, blob)
        with connected(address) as reader:
            channel.send_frame(reader, protocol.get(address.token, 1, 0))
            got, pace = 0, threading.Event()
            while not source.stats.dropped:
                got += len(reader.recv(1 << 17))  # some MB/s: never still for `SEND_S`
                assert got < len(blob), "it had its connection for as long as it liked"
                pace.wait(0.02)
        assert get(manifest, address) == blob


def connected(address: messages.WeightSource) -> socket.socket:
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), 5.0)


def prove(sock: socket.socket, address: messages.WeightSource) -> None:
    frame = protocol.have(address.token, 1)
    sock.sendall(len(frame).to_bytes(4, "little") + frame)
    size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
    assert isinstance(decode_reply(sock.recv(size, socket.MSG_WAITALL)), AvailableChunks)


def test_strangers_that_take_every_connection_keep_no_receiver_out(
    tcp: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_network_full_of_receivers_leaves_room_for_the_neighbours(
    tcp: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_connection_that_proves_nothing_ends_however_it_drips(
    tcp: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "UNPROVEN_S", 0.5)
    manifest, blob = version(1)
    address = tcp.publish(manifest, blob)
    with (
        connected(address) as known,
        connected(address) as silent,
        connected(address) as dripping,
        connected(address) as wrong,
    ):
        prove(known, address)
        dripping.sendall((500).to_bytes(4, "little"))
        guess = protocol.have(bytes(TOKEN_NBYTES), 1)
        for sock, piece in ((dripping, b"x"), (wrong, len(guess).to_bytes(4, "little") + guess)):
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                drip(sock, piece, 10.0)
        assert silent.recv(1) == b""
        prove(known, address)


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: messages.WeightSource) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    keys.secure(made, address.server_key, ME)
    made.linger, made.rcvtimeo = 0, 5000
    return made


def test_a_chunk_outside_the_version_is_refused() -> None:
    manifest, blob = version(1)
    context = zmq.Context()
    with WeightServer(encrypt=True) as source:
        address = source.publish(manifest, blob)
        asking = dealer(context, address)
        asking.connect(address.endpoint)
        try:
            for chunk in (-1, len(manifest.chunk_hashes)):
                asking.send(protocol.get(address.token, 1, chunk))
                assert decode_reply(asking.recv()) == NoSuch(1, chunk, "the version has no such chunk")
        finally:
            asking.close()
            context.term()


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_request_that_meets_a_fault_of_ours_is_told_and_ends_nothing(
    encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, faults = VersionStore.reply, [RuntimeError("out of luck")]

    def broken(self: VersionStore, *asked: Any) -> Any:
        if faults:
            raise faults.pop()
        return reply(self, *asked)

    monkeypatch.setattr(VersionStore, "reply", broken)
    for module in (sources, source_zmq):
        monkeypatch.setattr(module, "_log", structlog.get_logger())
    manifest, blob = version(1)
    with capture_logs() as told, WeightServer(encrypt=encrypt, local=False) as source:
        assert get(manifest, source.publish(manifest, blob)) == blob, "the receiver asked again"
        assert source.stats.failed == 1
    (line,) = [entry for entry in told if entry["event"] == "weights.not_answered"]
    assert (line["reason"], line["log_level"]) == ("RuntimeError: out of luck", "error")


DEAF = """
import signal, sys, threading
from scavenger.weights.source import WeightServer

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as ranks of a trainer do
source = WeightServer(encrypt=True, local=False)
threading.Thread(target=source._curve._context.term, daemon=True).start()  # its `poll` fails from now on
threading.Event().wait()
"""


def test_a_curve_source_whose_socket_fails_ends_a_process_that_ignores_sigterm_and_says_why() -> None:
    """It cannot serve again, and its holders would go on naming it."""
    done = subprocess.run(
        [sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done
    assert "error: the encrypted weights source cannot serve any more: ContextTerminated" in done.stderr
    assert "remedy: start this process again" in done.stderr
    assert "weights.source_ended" in done.stdout + done.stderr


def test_a_curve_source_whose_socket_fails_tells_its_owner_and_publishes_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_zmq, "_log", structlog.get_logger())

    def attempt(self: source_zmq.CurveServer, *_: object) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    monkeypatch.setattr(
        source_zmq.CurveServer, "_attempt", attempt
    )  # stands for a `recv` or `poll` that fails
    manifest, blob = version(1)
    context = zmq.Context()
    faults: queue.SimpleQueue[WeightsError] = queue.SimpleQueue()
    with capture_logs() as told, WeightServer(encrypt=True, local=False, on_fault=faults.put) as source:
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
    failures = [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ECONNABORTED, "Software caused connection abort"),
    ]
    accept = WeightServer._accept
    monkeypatch.setattr(WeightServer, "_accept", lambda self, sock: accept(self, Unwilling(sock, failures)))  # type: ignore[arg-type]
    manifest, blob = version(1)
    with WeightServer(local=False) as source:
        assert get(manifest, source.publish(manifest, blob)) == blob
        assert not failures
        source.publish(*version(2))
    assert not any(thread.is_alive() for _, thread in source._listeners)


def test_a_connection_for_which_there_is_no_thread_does_not_end_a_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, refused = threading.Thread.start, []

    def begin(thread: threading.Thread) -> None:
        if thread.name.startswith("weights-serve-") and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    manifest, blob = version(1)
    with WeightServer(local=False) as source:
        assert get(manifest, source.publish(manifest, blob)) == blob
        assert len(refused) == 2
        assert source.stats.dropped == 2


def test_a_source_that_finds_no_thread_for_its_neighbours_leaves_no_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        start(thread)
        begun.append(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    with pytest.raises(WeightsError, match="can't start new thread"):
        WeightServer()
    assert not begun[0].is_alive()
