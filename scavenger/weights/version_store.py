"""The versions that one process serves, who may read them, and who is reading: shared by the servers of all transports.

Owns the table and its leases. Knows no socket. A version is *served*, then *leaving* (`retire`: its readers may go on, new ones are
refused), then gone: when no reader's lease on it runs any more. Every request renews its reader's lease for `lease_s`, but none beyond
`RETIRED_LEASES * lease_s` after the version was retired, or the time that what the reader got since takes at `LEAST_NBYTES_PER_S`, each
chunk counted once; and only the `MOST_RETIRED` that were retired last are leaving: no reader makes
this process keep more. Memory may be written again only when the version is gone (`wait_gone`); a reader that is slower finds the
version gone, or a wrong hash, and asks another holder.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scavenger.errors import WeightsError
from scavenger.weights import choice, protocol
from scavenger.weights.delta_store import Chains, Encoder
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from scavenger.weights.pace import LEAST_NBYTES_PER_S
from scavenger.weights.protocol import (
    TOKEN_NBYTES,
    AvailableChunks,
    ChunkPart,
    Get,
    Have,
    NoSuch,
    OfferedDeltas,
    SourceRequest,
)

#: How many leases after a version was retired its last readers are refused: two minutes with leases of 15 s, the time that an engine gives
#: a pull. Who began before has had its time, unless its chunks come fast enough to earn more.
RETIRED_LEASES = 8
#: Retired versions whose readers may go on. One more, and the one that was retired first is gone.
MOST_RETIRED = 2


@dataclass(slots=True)
class StoredVersion:
    """A version that is served. `here`: which chunks are here; None when all are."""

    manifest: Manifest
    blob: memoryview
    token: bytes
    buffer: Buffer | None
    here: np.ndarray[Any, Any] | None
    retired_at: float | None = None  # by the store's clock; None: it is served to new readers too
    readers: dict[Hashable, float] = field(default_factory=dict)  # who -> until when its lease runs
    #: Who -> which chunks it got since the version was retired.
    got: dict[Hashable, np.ndarray[Any, Any]] = field(default_factory=dict)
    parts: tuple[int, ...] | None = (
        None  # the chunks that are here, now and later; None: all, or all that will come
    )
    coming: Callable[[], np.ndarray[Any, Any]] | None = None  # which chunks are on their way here
    since: float = 0.0  # when it was first served, by the store's clock

    def earned_s(self, reader: Hashable) -> float:
        """Seconds that what the reader got since the version was retired takes at `LEAST_NBYTES_PER_S`."""
        got = self.got.get(reader)
        return 0.0 if got is None else np.count_nonzero(got) * self.manifest.chunk_nbytes / LEAST_NBYTES_PER_S

    def ranges(self) -> list[tuple[int, int]]:
        """The byte ranges [start, stop) that have memory, or will have."""
        if self.parts is None:
            return [(0, self.manifest.total_nbytes)]
        found: list[tuple[int, int]] = []
        for chunk in self.parts:
            start, stop = self.manifest.chunk_range(chunk)
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
        return found


@dataclass(slots=True)
class SourceStats:
    """Counters since the source started."""

    parts: int = 0
    nbytes: int = 0
    refused: int = 0
    malformed: int = 0
    failed: int = 0  # requests that could not be answered for a fault of ours
    dropped: int = 0
    mapped: int = 0


def _packed(chunks: np.ndarray[Any, Any]) -> bytes:
    return np.packbits(chunks, bitorder="little").tobytes()


StoreReply = tuple[ChunkPart | NoSuch | AvailableChunks, memoryview | None]


class VersionStore:
    """Thread-safe. `keep` complete versions are served; one more retires the oldest. The base of served adapters is kept beside."""

    def __init__(
        self,
        keep: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        chains: Chains | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        """`chains`: what is given instead of whole chunks. `encoder` is told each version that is served whole, to make more of them."""
        self.stats = SourceStats()
        self._keep = keep
        self._lease_s = lease_s
        self._clock = clock
        self._versions: OrderedDict[int, StoredVersion] = OrderedDict()
        self._changed = threading.Condition()
        self.chains = chains or Chains(0)
        self._encoder = encoder

    def put(
        self,
        manifest: Manifest,
        blob: memoryview,
        buffer: Buffer | None,
        *,
        empty: bool = False,
        chunks: Sequence[int] | None = None,
        coming: Callable[[], np.ndarray[Any, Any]] | None = None,
    ) -> bytes:
        """Serve a version; returns its token. `empty`: nothing is there yet. `chunks`: all that is there, now and later; None = everything.
        `coming`: which chunks are on their way here.

        Raises `WeightsError`.
        """
        if blob.nbytes != manifest.total_nbytes:
            raise WeightsError(
                f"version {manifest.version}: {blob.nbytes} bytes given, the manifest names {manifest.total_nbytes}"
            )
        with self._changed:
            present = self._versions.get(manifest.version)
            if present is not None and present.manifest.root != manifest.root:
                raise WeightsError(
                    f"version {manifest.version} was published with other weights",
                    "versions are never reused",
                )
            if present is None or present.retired_at is not None:
                here = (
                    np.zeros(len(manifest.chunk_hashes), dtype=bool) if empty or chunks is not None else None
                )
                if here is not None and chunks is not None:
                    here[list(chunks)] = True
                token = secrets.token_bytes(TOKEN_NBYTES)
                parts = None if chunks is None else tuple(chunks)
                present = self._versions[manifest.version] = StoredVersion(
                    manifest,
                    blob.toreadonly(),
                    token,
                    buffer,
                    here,
                    parts=parts,
                    coming=coming,
                    since=self._clock(),
                )
                served = {v: held.manifest for v, held in self._versions.items() if held.retired_at is None}
                bases = {of.adapter.base for of in served.values() if of.adapter is not None}
                for old in [v for v, of in served.items() if of.root not in bases][: -self._keep]:
                    self._retire(old)
                if not empty and self._encoder is not None:
                    self._encoder.published(manifest, present.blob, chunks)
            return present.token

    def arrived(self, version: int, chunk: int) -> None:
        """Note that a chunk of a version that began empty is here and verified."""
        held = self._versions.get(version)
        if held is not None and held.here is not None:
            held.here[chunk] = True

    def completed(self, version: int) -> None:
        with self._changed:
            if version in self._versions:
                self._versions[version].here = self._versions[version].coming = None

    def retire(self, version: int) -> None:
        with self._changed:
            self._retire(version)

    def _retire(self, version: int) -> None:
        held = self._versions.get(version)
        if held is not None:
            held.retired_at = self._clock() if held.retired_at is None else held.retired_at
            self._sweep()

    def _sweep(self) -> None:
        """Let go of the retired versions that nobody reads, and of the first ones of more than `MOST_RETIRED`."""
        now = self._clock()
        retired = {v: held.retired_at for v, held in self._versions.items() if held.retired_at is not None}
        read = [v for v in retired if any(until > now for until in self._versions[v].readers.values())]
        read.sort(key=retired.__getitem__)
        for version in retired.keys() - set(read[-MOST_RETIRED:]):
            del self._versions[version]
            self._changed.notify_all()

    def withdraw(self, version: int) -> None:
        """Stop serving it, to present readers too. Only for memory that is not written again."""
        with self._changed:
            if self._versions.pop(version, None) is not None:
                self._changed.notify_all()

    def versions(self) -> list[int]:
        """The versions that new readers can get."""
        with self._changed:
            return [version for version, held in self._versions.items() if held.retired_at is None]

    def wait_gone(self, version: int, timeout_s: float) -> bool:
        """Wait until each reader of the version ended or its lease ran out. False after `timeout_s`, or where it is not retired."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while True:
                self._sweep()
                held = self._versions.get(version)
                if held is None:
                    return True
                now = self._clock()
                if held.retired_at is None or now >= deadline:
                    return False
                self._changed.wait(max(0.001, min([*held.readers.values(), deadline]) - now))

    def reader_left(self, reader: Hashable) -> None:
        with self._changed:
            for held in self._versions.values():
                held.readers.pop(reader, None)
                held.got.pop(reader, None)
            self._sweep()

    def find(self, request: SourceRequest, reader: Hashable) -> StoredVersion | NoSuch:
        """The version that was asked for, with the reader's lease renewed; or why not."""
        chunk = request.chunk if isinstance(request, Get) else -1
        with self._changed:
            self._sweep()
            held = self._versions.get(request.version)
            if not protocol.proven(request, held.token if held else bytes(TOKEN_NBYTES)) or held is None:
                self.stats.refused += 1
                return NoSuch(
                    request.version, chunk, f"version {request.version} is not served here under this token"
                )
            now = self._clock()
            until = now + self._lease_s
            if held.retired_at is not None:
                until = min(
                    until, held.retired_at + max(RETIRED_LEASES * self._lease_s, held.earned_s(reader))
                )
            if until <= now or (held.retired_at is not None and reader not in held.readers):
                self.stats.refused += 1
                return NoSuch(
                    request.version, chunk, f"version {request.version} is not served here any more"
                )
            held.readers[reader] = until
            return held

    def reply(self, request: SourceRequest, reader: Hashable) -> StoreReply:
        """What to answer: the message, and a chunk's bytes."""
        held = self.find(request, reader)
        if isinstance(held, NoSuch):
            return held, None
        if not isinstance(request, Get):
            here, coming, offer = held.here, held.coming, self._offer(request, held)
            if here is None:
                return AvailableChunks(request.version, complete=True, deltas=offer), None
            return AvailableChunks(
                request.version, False, _packed(here), _packed(coming()) if coming is not None else b"", offer
            ), None
        if not 0 <= request.chunk < len(held.manifest.chunk_hashes):
            self.stats.refused += 1
            return NoSuch(request.version, request.chunk, "the version has no such chunk"), None
        if held.here is not None and not held.here[request.chunk]:
            return NoSuch(request.version, request.chunk, "the chunk is not here yet", absent=True), None
        self._note_got(held, reader, request.chunk)
        start, stop = held.manifest.chunk_range(request.chunk)
        encoded = (
            self.chains.find(request.parent, held.manifest.root, request.chunk, stop - start)
            if request.parent
            else None
        )
        if encoded is not None:
            return ChunkPart(request.version, request.chunk, len(encoded), delta=True), memoryview(encoded)
        return ChunkPart(request.version, request.chunk, stop - start), held.blob[start:stop]

    def _note_got(self, held: StoredVersion, reader: Hashable, chunk: int) -> None:
        if held.retired_at is None:
            return
        with self._changed:
            if reader in held.readers:
                chunks = len(held.manifest.chunk_hashes)
                held.got.setdefault(reader, np.zeros(chunks, dtype=bool))[chunk] = True

    def _offer(self, request: SourceRequest, held: StoredVersion) -> OfferedDeltas | None:
        """What deltas there are for the receiver; its own rates are noted. None of a version that is still on its way here."""
        if not isinstance(request, Have) or not request.parent:
            return None
        encoder = self._encoder
        if encoder is not None and request.link:
            late_s = self._clock() - held.since
            encoder.heard(choice.ReceiverReport(request.link, request.applying, late_s))
        if held.here is not None and held.parts is None:
            return None
        chunks = len(held.manifest.chunk_hashes) if held.parts is None else len(held.parts)
        expected = (encoder.share, encoder.rate.per_s) if encoder is not None else ()
        return self.chains.offer(
            request.parent, held.manifest.root, chunks, held.manifest.chunk_nbytes, *expected
        )
