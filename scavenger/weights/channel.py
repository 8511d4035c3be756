"""The receiver's end of a connection to one holder: the same four calls on every transport.

Owns one socket or descriptor. Decides nothing: `transfer` says what to ask, `pull` when. A channel is used by one thread; `close` may be
called by another and wakes it. Errors of the connection are `OSError` or `WireError`: the caller gives it up and may open another.

  tcp://host:port with a server key     ZeroMQ under CURVE
  tcp://host:port without               TCP; requests carry proofs, bytes are in the clear and checked by hash
  WeightSource.local on this machine    the holder's memory itself, by a descriptor that it passes; else one of the above
  WeightSource.nixl                     the holder's memory by NIXL (`channel_rdma`), where both have it; else one of the above
  file://path                           a spooled version, on a filesystem that both see
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import zmq

from scavenger.errors import WireError
from scavenger.parsing import whole
from scavenger.protocol import messages
from scavenger.protocol.keys import KeyPair, secure
from scavenger.weights import protocol
from scavenger.weights.manifest import Manifest
from scavenger.weights.pace import LEAST_NBYTES_PER_S
from scavenger.weights.protocol import MAX_REPLY_BYTES, AvailableChunks, ChunkPart, NoSuch, SourceReply
from scavenger.weights.spool import BLOB

CONNECT_S = 5.0
POLL_S = 0.1  # how long a receiver waits for bytes before it looks at the clock
NEIGHBOUR_S = 1.0  # how long a busy neighbour may take to pass its memory, before it is read over the network
OnProgress = Callable[[], None]
Bits = np.ndarray[tuple[int], np.dtype[np.bool_]]


class Channel(Protocol):
    def ask(self, chunk: int, parent: bytes = b"") -> None:
        """Request a chunk, or a delta to it from the weights with root `parent`."""

    def ask_have(self, parent: bytes = b"", link: float = 0.0, applying: float = 0.0) -> None:
        """Request the list of what the holder has, and of deltas from the weights with root `parent`. The rest as in `protocol.Have`."""

    def reply(self, into: memoryview, heard: OnProgress) -> SourceReply | None:
        """The next answer, a chunk's bytes in `into`; None when nothing came for `POLL_S`. `heard` is called as bytes come."""

    def close(self) -> None: ...


@functools.cache
def machine() -> str:
    """Where this process can be reached by a local socket: the machine (its boot id), and the network namespace on it."""
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}.{namespace}"


def is_near(source: messages.WeightSource) -> bool:
    """Whether the source is on this machine."""
    return source.local.partition(":")[0] == machine()


def set_timeouts(sock: socket.socket, poll_s: float, send_s: float) -> None:
    """A blocking socket whose calls end after a time: one system call for a whole chunk, where Python's own timeouts need two a piece."""
    sock.setblocking(True)
    for option, seconds in ((socket.SO_RCVTIMEO, poll_s), (socket.SO_SNDTIMEO, send_s)):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def read_exactly(sock: socket.socket, into: memoryview, heard: OnProgress, timeout_s: float) -> None:
    """Fill `into`. Raises `OSError` when the peer ends or no byte comes for `timeout_s`."""
    done, since = 0, time.monotonic()
    while done < len(into):
        try:
            got = sock.recv_into(into[done:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            if time.monotonic() - since >= timeout_s:
                raise TimeoutError(f"no byte for {timeout_s:g} s") from None
            continue
        if not got:
            raise ConnectionResetError("the other end closed the connection")
        done += got
        since = time.monotonic()
        heard()


def send_within(sock: socket.socket, data: memoryview, timeout_s: float) -> None:
    """Send all of it. Raises `OSError` when the peer ends, or has read fewer bytes after `timeout_s` than `LEAST_NBYTES_PER_S` brings."""
    done, since = 0, time.monotonic()
    while done < len(data):
        done += sock.send(data[done:])
        if time.monotonic() - since > timeout_s + done / LEAST_NBYTES_PER_S:
            raise TimeoutError(f"{done} of {len(data)} bytes read within {timeout_s:g} s")


class TcpChannel:
    """Length-prefixed frames on a stream socket; a Part's bytes follow its frame."""

    def __init__(self, sock: socket.socket, version: int, token: bytes, timeout_s: float) -> None:
        self._sock = sock
        self._version, self._token = version, token
        self._timeout_s = timeout_s
        self._head = memoryview(bytearray(MAX_REPLY_BYTES))
        self._owner = threading.get_ident()

    @classmethod
    def connect(cls, source: messages.WeightSource, version: int, timeout_s: float) -> TcpChannel:
        host, _, port = source.endpoint.removeprefix("tcp://").rpartition(":")
        number = whole(port, most=65_535)
        if not host or number is None:
            raise WireError(f"{source.endpoint!r} is no address of a holder")
        sock = socket.create_connection((host, number), min(CONNECT_S, timeout_s))
        set_timeouts(sock, POLL_S, timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sock, version, source.token, timeout_s)

    def ask(self, chunk: int, parent: bytes = b"") -> None:
        send_frame(self._sock, protocol.get(self._token, self._version, chunk, parent))

    def ask_have(self, parent: bytes = b"", link: float = 0.0, applying: float = 0.0) -> None:
        send_frame(self._sock, protocol.have(self._token, self._version, parent, link, applying))

    def ask_reach(self) -> None:
        """Ask where NIXL finds the version's memory."""
        send_frame(self._sock, protocol.reach(self._token, self._version))

    def reply(self, into: memoryview, heard: OnProgress) -> SourceReply | None:
        try:
            first = self._sock.recv_into(self._head[:4])
        except BlockingIOError:
            return None
        if not first:
            raise ConnectionResetError("the holder closed the connection")
        read_exactly(self._sock, self._head[first:4], heard, self._timeout_s)
        size = int.from_bytes(self._head[:4], "little")
        if size > MAX_REPLY_BYTES:
            raise WireError(f"an answer of {size} bytes")
        read_exactly(self._sock, self._head[:size], heard, self._timeout_s)
        reply = protocol.decode_reply(self._head[:size])
        if isinstance(reply, ChunkPart):
            if not 0 <= reply.nbytes <= len(into):
                raise WireError(f"a chunk of {reply.nbytes} bytes, over the manifest's {len(into)}")
            read_exactly(self._sock, into[: reply.nbytes], heard, self._timeout_s)
        return reply

    def close(self) -> None:
        """The descriptor is closed by the thread that reads from it: it may be about to, and the number may be another socket's by then."""
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._owner == threading.get_ident():
            self._sock.close()


def send_frame(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(len(frame).to_bytes(4, "little") + frame)


class FileChannel:
    """A descriptor of all the bytes: a neighbour's memory, or a spooled file. `asking`: the socket on which more can be asked."""

    def __init__(self, fd: int, manifest: Manifest, asking: TcpChannel | None = None) -> None:
        self._fd = fd
        self._manifest = manifest
        self._asking = asking
        self._asked: deque[int] = deque()  # -1: what is there
        self._owner = threading.get_ident()
        self._closing = False

    @classmethod
    def open(cls, path: str, manifest: Manifest) -> FileChannel:
        """A spooled version's bytes. Who names the path does not choose what is opened: only what a spool writes, and no wait for a FIFO.

        Raises `WireError` for anything else, `OSError` where there is nothing.
        """
        if os.path.basename(path) != BLOB:
            raise WireError(f"{path!r} is no spooled version's {BLOB}")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        return cls(_regular(fd, manifest.total_nbytes), manifest)

    @classmethod
    def neighbour(cls, source: messages.WeightSource, manifest: Manifest, timeout_s: float) -> FileChannel:
        """Ask for the memory over the holder's local socket. Raises `OSError` or `WireError` where it cannot be had."""
        _, _, name = source.local.partition(":")
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + name)
            set_timeouts(sock, min(NEIGHBOUR_S, timeout_s), timeout_s)
            send_frame(sock, protocol.map_(source.token, manifest.version))
            _, fds, _, _ = socket.recv_fds(sock, 1, 1)
            if not fds:
                raise WireError("the neighbour passes no memory of this version")
            fd = _regular(fds[0], max(manifest.total_nbytes, 1))  # an empty version's memory has one byte
            set_timeouts(sock, POLL_S, timeout_s)
            return cls(fd, manifest, TcpChannel(sock, manifest.version, source.token, timeout_s))
        except BaseException:
            sock.close()
            raise

    def ask(self, chunk: int, parent: bytes = b"") -> None:
        self._asked.append(chunk)

    def ask_have(self, parent: bytes = b"", link: float = 0.0, applying: float = 0.0) -> None:
        if self._asking is not None:
            self._asking.ask_have()  # memory is read whole
        self._asked.append(-1)

    def reply(self, into: memoryview, heard: OnProgress) -> SourceReply | None:
        if not self._asked:
            return None
        if self._asked[0] < 0 and self._asking is not None:
            reply = self._asking.reply(into, heard)
            if reply is not None:  # else its answer is still to come
                self._asked.popleft()
            return reply
        chunk = self._asked.popleft()
        if chunk < 0:
            return AvailableChunks(self._manifest.version, complete=True)
        start, stop = self._manifest.chunk_range(chunk)
        done = start
        while done < stop and not self._closing:
            got = os.preadv(self._fd, [into[done - start : stop - start]], done)
            if not got:
                return NoSuch(self._manifest.version, chunk, f"the file ends at byte {done}")
            done += got
            heard()
        if done < stop:
            raise ConnectionResetError("closed")
        return ChunkPart(self._manifest.version, chunk, stop - start)

    def close(self) -> None:
        """The descriptor belongs to the thread that opened it: a read may be stuck in it for ever, and who says so must not be."""
        self._closing = True
        if self._asking is not None:
            self._asking.close()
        if self._owner == threading.get_ident() and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _regular(fd: int, nbytes: int) -> int:
    """Return the descriptor if it is a regular file of this size; otherwise close it and raise `WireError`."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
        os.close(fd)
        what = f"a file of {found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "no regular file"
        raise WireError(f"{what} is given for a version of {nbytes} bytes")
    return fd


class SharedContext:
    """The ZeroMQ context of several threads' channels: made with the first of them, ended with the last, whenever that is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._users = 0

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket, for which `done` is to be called once it is closed."""
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
            made = self._context.socket(kind)
            self._users += 1
            return made

    def done(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._context is not None:
                self._context.term()  # all of its sockets are closed and none lingers, so it waits for nothing
                self._context = None


class ZmqChannel:
    """DEALER under CURVE. The holder's key was told over the authenticated channel, so it is the holder that answers."""

    def __init__(
        self,
        source: messages.WeightSource,
        version: int,
        keypair: KeyPair,
        context: SharedContext,
        chunk_nbytes: int,
    ) -> None:
        self._version, self._token = version, source.token
        self._context = context
        self._socket = context.socket(zmq.DEALER)
        try:
            secure(self._socket, source.server_key, keypair)
            for option, value in (
                (zmq.MAXMSGSIZE, chunk_nbytes + MAX_REPLY_BYTES),
                (zmq.RECONNECT_IVL, 50),
                (zmq.RECONNECT_IVL_MAX, 1000),
                (zmq.LINGER, 0),
            ):
                self._socket.setsockopt(option, value)
            self._socket.connect(source.endpoint)
        except zmq.ZMQError as error:  # another worker told the key and the address: they may be anything
            self.end()
            raise WireError(f"{source.endpoint!r} cannot be used: {error}") from error
        self._closed = threading.Event()

    def ask(self, chunk: int, parent: bytes = b"") -> None:
        self._say(protocol.get(self._token, self._version, chunk, parent))

    def ask_have(self, parent: bytes = b"", link: float = 0.0, applying: float = 0.0) -> None:
        self._say(protocol.have(self._token, self._version, parent, link, applying))

    def _say(self, request: bytes) -> None:
        try:
            self._socket.send(request, zmq.NOBLOCK)
        except zmq.Again:  # to wait here would be for ever: a key that was refused is not tried again
            raise ConnectionRefusedError(
                "the holder takes no requests: it refuses this key, or has taken none for long"
            ) from None

    def reply(self, into: memoryview, heard: OnProgress) -> SourceReply | None:
        if self._closed.is_set():
            raise ConnectionResetError("closed")
        if not self._socket.poll(round(POLL_S * 1000)):
            return None
        frames = self._socket.recv_multipart(copy=False)
        heard()
        reply = protocol.decode_reply(frames[0].buffer)
        if len(frames) != (2 if isinstance(reply, ChunkPart) else 1):
            raise WireError(f"an answer of {len(frames)} frames")
        if isinstance(reply, ChunkPart):
            data = frames[1].buffer
            if len(data) != reply.nbytes or reply.nbytes > len(into):
                raise WireError(f"a chunk of {len(data)} bytes, told as {reply.nbytes}")
            into[: reply.nbytes] = data
        return reply

    def close(self) -> None:
        """A ZeroMQ socket belongs to its thread: that one ends it (`end`) when it next looks."""
        self._closed.set()

    def end(self) -> None:
        self._socket.close(linger=0)
        self._context.done()


def here(available: AvailableChunks, chunks: int) -> Bits | None:
    """Which chunks an answer says are there, None for all. Raises `WireError` when it says too little."""
    return None if available.complete else _bits(available.bitmap, chunks)


def coming(available: AvailableChunks, chunks: int) -> Bits | None:
    """Which chunks an answer says are on their way there, None where it does not say."""
    return _bits(available.coming, chunks) if available.coming and not available.complete else None


def _bits(bitmap: bytes, chunks: int) -> Bits:
    if len(bitmap) * 8 < chunks:
        raise WireError(f"a bitmap of {len(bitmap)} bytes for {chunks} chunks")
    return np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), count=chunks, bitorder="little").astype(bool)
