"""A receiver's channel that reads chunks by NIXL, and asks what there is on the holder's ordinary connection.

Owns one registered piece of this process's memory. The holder's processor takes no part in a read, so the reader renews its lease by asking
what is there; a read of memory that is written again meanwhile has a wrong hash.

Boundary: NIXL, which may not be installed.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from scavenger.errors import WireError
from scavenger.protocol import messages
from scavenger.weights import rdma
from scavenger.weights.channel import OnProgress, TcpChannel
from scavenger.weights.manifest import Manifest
from scavenger.weights.protocol import ChunkPart, Reached, SourceReply

RENEW_S = 2.0


class RdmaChannel:
    """Like every `Channel`: one thread's, but for `close`."""

    def __init__(self, asking: TcpChannel, reached: Reached, manifest: Manifest, timeout_s: float) -> None:
        self._asking, self._manifest, self._timeout_s = asking, manifest, timeout_s
        self._agent = rdma.shared("read")
        self._peer, self._base = self._agent.meet(reached.metadata), reached.address
        self._asked: deque[int] = deque()
        self._due = 0  # answers that the holder owes
        self._renewed_at = time.monotonic()
        self._own: Any = None
        self._closing = False
        self.failed = False  # NIXL did, whatever the holder's ordinary connection does

    @classmethod
    def connect(cls, source: messages.WeightSource, manifest: Manifest, timeout_s: float) -> RdmaChannel:
        """Raises `OSError`, `WireError` or `WeightsError` where the holder cannot be read so."""
        rdma.shared("read")
        asking = TcpChannel.connect(source, manifest.version, timeout_s)
        try:
            asking.ask_reach()
            until = time.monotonic() + timeout_s
            while (reply := asking.reply(memoryview(b""), lambda: None)) is None:
                if time.monotonic() >= until:
                    raise TimeoutError(f"no answer for {timeout_s:g} s")
            if not isinstance(reply, Reached):
                raise WireError(f"the holder is not read by NIXL: {getattr(reply, 'reason', reply)}")
            return cls(asking, reply, manifest, timeout_s)
        except BaseException:  # whatever it was, the connection is not the caller's to close
            asking.close()
            raise

    def ask(self, chunk: int, parent: bytes = b"") -> None:
        self._asked.append(chunk)

    def ask_have(self, parent: bytes = b"", link: float = 0.0, applying: float = 0.0) -> None:
        self._asking.ask_have()  # memory is read whole
        self._due += 1
        self._renewed_at = time.monotonic()

    def reply(self, into: memoryview, heard: OnProgress) -> SourceReply | None:
        """As any channel's; one that only renewed the lease is passed on too, which does no harm."""
        if time.monotonic() - self._renewed_at >= RENEW_S:
            self.ask_have()
        if self._due:
            found = self._asking.reply(into, heard)
            self._due -= found is not None
            return found
        if not self._asked:
            return None
        chunk = self._asked.popleft()
        start, stop = self._manifest.chunk_range(chunk)
        try:
            if self._own is None:
                self._own = self._agent.own(into)
            self._agent.read(
                self._peer, self._base + start, into[: stop - start], self._timeout_s, lambda: self._closing
            )
        except OSError:
            self.failed = not self._closing
            raise
        heard()
        return ChunkPart(self._manifest.version, chunk, stop - start)

    def close(self) -> None:
        self._closing = True
        self._asking.close()

    def end(self) -> None:
        """By the thread that read: its memory is NIXL's no longer."""
        if self._own is not None:
            self._agent.disown(self._own)
            self._own = None
