"""A scripted daemon for the worker's tests: a real ROUTER under CURVE with an allow-list, told what to answer by the test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self, TypeVar

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from scavenger.protocol import keys, messages
from scavenger.protocol.keys import KeyPair, Rendezvous

M = TypeVar("M", bound=messages.Message)


class _Allowed:
    def __init__(self, allowed: set[str]) -> None:
        self._allowed = allowed

    def callback(self, _domain: str, key: bytes) -> bool:
        return key.decode() in self._allowed


class FakeDaemon:
    """Answers heartbeats while `answers` is True; everything else waits in `inbox` until the test expects it.

    Where `welcome` is set, a worker whose answer came too late (its imports held it up), and which therefore says hello again, is welcomed
    again. Its first hello is the test's to answer.
    """

    def __init__(self, state_dir: Path, server: KeyPair, allowed: set[str], generation: int = 1) -> None:
        self.generation = generation
        self.answers = True
        self.welcome: messages.Welcome | None = None
        self.inbox: list[messages.Message] = []
        self.beats: list[messages.Heartbeat] = []
        self._arrived = asyncio.Event()
        self._peer = b""
        self._said_hello = ""  # the session of the last hello
        self._context = zmq.asyncio.Context()
        self._auth = ThreadAuthenticator(zmq.Context(self._context))
        self._auth.start()
        self._auth.configure_curve_callback("*", _Allowed(allowed))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = (
            server.public.encode(),
            server.secret.encode(),
        )
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        keys.write_rendezvous(
            state_dir, Rendezvous(f"tcp://127.0.0.1:{port}", server.public, generation, 1, "here")
        )
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            self._peer, frame = await self._socket.recv_multipart()
            message = messages.decode_to_daemon(frame)
            if isinstance(message, messages.Heartbeat):
                self.beats.append(message)
                if self.answers:
                    self.send(messages.HeartbeatAck(self.generation))
            elif (
                self.welcome
                and isinstance(message, messages.WorkerHello)
                and message.session == self._said_hello
            ):
                self.send(self.welcome)
            else:
                if isinstance(message, messages.WorkerHello):
                    self._said_hello = message.session
                self.inbox.append(message)
            self._arrived.set()

    def send(self, message: messages.Message) -> None:
        self._socket.send_multipart([self._peer, messages.encode(message)])

    async def expect(self, kind: type[M], timeout_s: float = 60.0) -> M:
        """The next message of this kind; those before it stay in the inbox."""
        async with asyncio.timeout(timeout_s):
            while True:
                for i, message in enumerate(self.inbox):
                    if isinstance(message, kind):
                        del self.inbox[i]
                        return message
                self._arrived.clear()
                await self._arrived.wait()

    async def beat(self, timeout_s: float = 60.0) -> messages.Heartbeat:
        """The newest heartbeat, once there is one."""
        async with asyncio.timeout(timeout_s):
            while not self.beats:
                self._arrived.clear()
                await self._arrived.wait()
            return self.beats[-1]

    async def tokens(self, sample: int, length: int, timeout_s: float = 60.0) -> list[int]:
        """Collect a sample's chunks, in order, until `length` tokens are there; checks that resends are exact."""
        have: list[int] = []
        while len(have) < length:
            for chunk in (await self.expect(messages.Chunks, timeout_s)).chunks:
                if chunk.sample_id == sample:
                    new = messages.unpack_tokens(chunk.tokens)
                    assert chunk.offset <= len(have)
                    overlap = have[chunk.offset :]
                    assert list(new[: len(overlap)]) == overlap
                    have += new[len(overlap) :]
        return have

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._task.cancel()
        self._auth.stop()
        self._socket.close(linger=0)
        self._context.destroy(linger=0)
