"""Fetches one version from its sources and returns it only when every byte is verified (I8).

Owns the sockets of one pull; `transfer` decides. One task a source, each with its own connection. Knows no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog
import zmq
import zmq.asyncio

from scavenger import wire
from scavenger.errors import WeightsError, WireError
from scavenger.keys import KeyPair
from scavenger.weights.manifest import Manifest
from scavenger.weights.protocol import Get, Part, decode_answer, encode
from scavenger.weights.transfer import Limits, Transfer, Verdict

_log = structlog.get_logger(__name__)
_IDLE_S = 0.02  # how soon a source without work looks whether another one's chunks came back
_FRAME_SLACK = 4096


async def pull(
    manifest: Manifest,
    sources: Sequence[wire.WeightSource],
    keypair: KeyPair,
    deadline_s: float,
    *,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bytearray:
    """Return the version's complete, verified blob.

    Raises `WeightsError`, naming what is missing and each source's last failure, after `deadline_s` or as soon as every source
    has refused or sent wrong bytes too often. Nothing is returned unverified; nothing is left behind.
    """
    transfer = Transfer(manifest, len(sources), limits or Limits(), clock())
    if transfer.complete():
        return transfer.blob
    if not sources:
        raise WeightsError(f"version {manifest.version} has no source", "the trainer publishes it again when it reconnects")
    context = zmq.asyncio.Context()
    tasks = [asyncio.create_task(_Stream(transfer, i, source, keypair, context, clock).run()) for i, source in enumerate(sources)]
    try:
        async with asyncio.timeout(deadline_s):
            await asyncio.gather(*tasks)
    except TimeoutError as error:
        raise WeightsError(f"version {manifest.version} not complete after {deadline_s:g} s: {transfer.summary()}") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)
    if not transfer.complete():
        raise WeightsError(f"version {manifest.version}: every source was given up: {transfer.summary()}")
    return transfer.blob


class _Stream:
    """The connection to one source."""

    def __init__(
        self,
        transfer: Transfer,
        index: int,
        source: wire.WeightSource,
        keypair: KeyPair,
        context: zmq.asyncio.Context,
        clock: Callable[[], float],
    ) -> None:
        self._transfer = transfer
        self._index = index
        self._source = source
        self._keypair = keypair
        self._context = context
        self._clock = clock

    async def run(self) -> None:
        """Ask and take until the version is complete or this source is given up."""
        transfer, index = self._transfer, self._index
        socket = self._connect()
        if socket is None:
            return
        try:
            while not transfer.complete() and not transfer.holders[index].given_up:
                now = self._clock()
                if transfer.stalled(index, now):
                    _log.warning("weights.stalled", source=self._source.endpoint)
                    socket.close(linger=0)
                    if (socket := self._connect()) is None:
                        return
                for chunk in transfer.ask(index, now):
                    await socket.send(encode(Get(transfer.manifest.version, self._source.token, chunk)))
                wait = transfer.next_wait(index, now) if transfer.holders[index].asked else _IDLE_S
                if await socket.poll(max(1, round(wait * 1000))):
                    self._take(await socket.recv_multipart(copy=False))
        finally:
            if socket is not None:
                socket.close(linger=0)

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        now = self._clock()
        try:
            answer = decode_answer(frames[0].buffer)
            if answer.version != self._transfer.manifest.version or len(frames) != (2 if isinstance(answer, Part) else 1):
                raise WireError("an answer that was not asked for")
        except WireError as error:
            # Worth no more than silence: what was asked goes to others when the source stalls.
            _log.warning("weights.garbage", source=self._source.endpoint, reason=error.cause)
            return
        if not isinstance(answer, Part):
            self._transfer.refused(self._index, answer.chunk, answer.reason, now)
            return
        verdict = self._transfer.delivered(self._index, answer.chunk, frames[1].buffer, now)
        if verdict is Verdict.CORRUPT:
            _log.warning("weights.corrupt", source=self._source.endpoint, chunk=answer.chunk)

    def _connect(self) -> zmq.asyncio.Socket | None:
        """A fresh connection; None, and the source given up, when its address cannot be used."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._source.server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keypair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keypair.secret.encode())
        socket.setsockopt(zmq.MAXMSGSIZE, self._transfer.manifest.chunk_nbytes + _FRAME_SLACK)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(self._source.endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._transfer.abandon(self._index, f"{self._source.endpoint!r} cannot be used: {error}")
            return None
        return socket
