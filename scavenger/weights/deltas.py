"""The deltas that a process can give: from each of the last versions to the next, kept when the bytes are gone.

Owns the encoded deltas and the choice between a chain and the whole chunk. Knows no socket. A publisher makes them beside training
(`Deltas`), by one thread of its own; an engine keeps those that it was sent, once what they made had the right hash, and gives them on
(`Relay`). A request for which there is none (yet) is answered with the whole chunk, so nobody waits for a delta.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from scavenger.weights import delta
from scavenger.weights.manifest import Manifest


@dataclass(slots=True)
class _Step:
    """From one version's weights to those of a later one: a chain for each chunk."""

    parent: bytes
    root: bytes
    chunks: dict[int, bytes] = field(default_factory=dict)
    nbytes: int = 0


class Relay:
    """The last `steps` that came here. `nbytes` of them are kept at most: the oldest go first; what is still beyond is not kept."""

    def __init__(self, steps: int, nbytes: int = 4 << 30) -> None:
        self._most_steps = steps
        self._most = nbytes
        self._steps: OrderedDict[bytes, _Step] = OrderedDict()  # by the root that a step leads to
        self._lock = threading.Lock()
        self.used = 0

    def published(self, manifest: Manifest, blob: memoryview, chunks: Sequence[int] | None = None) -> None:
        """A version is served from now on. Nothing is made of it here."""

    def wait(self, *, stop: bool = False) -> None:
        """Until nothing is being made any more."""

    def add(self, parent: bytes, root: bytes, chunk: int, encoded: bytes) -> None:
        """A chunk's chain from the parent's weights that made the right bytes. May be called by any thread."""
        with self._lock:
            step = self._steps.get(root)
            if step is None or step.parent != parent:
                self._steps.pop(root, None)
                step = self._steps[root] = _Step(parent, root)
            while len(self._steps) > self._most_steps or (len(self._steps) > 1 and self._nbytes() + len(encoded) > self._most):
                self._steps.popitem(last=False)
            if chunk not in step.chunks and self._nbytes() + len(encoded) <= self._most:
                step.chunks[chunk] = encoded
                step.nbytes += len(encoded)

    def bound(self, nbytes: int) -> None:
        """Keep so many bytes at most from now on."""
        self._most = nbytes

    def _nbytes(self) -> int:
        return sum(step.nbytes for step in list(self._steps.values()))

    def find(self, parent: bytes, root: bytes, chunk: int, nbytes: int) -> bytes | None:
        """The chunk's chain from the parent's weights, where there is one and it is worth its while."""
        found: list[bytes] = []
        at = root
        while at != parent:
            if len(found) >= self._most_steps:  # weights that came back, A -> B -> A, lead round for ever
                return None
            step = self._steps.get(at)
            made = step.chunks.get(chunk) if step is not None else None
            if step is None or made is None:
                return None
            found.append(made)
            at = step.parent
        if not found or sum(map(len, found)) > delta.WORTH * nbytes or sum(map(delta.links, found)) > delta.MOST_LINKS:
            return None
        self.used += 1
        return b"".join(found[::-1])


class Deltas(Relay):
    """Makes the last `links` steps from the versions as they are published."""

    def __init__(self, links: int, nbytes: int = 4 << 30) -> None:
        super().__init__(min(links, delta.MOST_LINKS), nbytes)
        self._last: tuple[Manifest, memoryview] | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.encoded = 0

    def published(self, manifest: Manifest, blob: memoryview, chunks: Sequence[int] | None = None) -> None:
        """The next version; its deltas from the one before are made from here on. Both must stay as they are meanwhile.

        `chunks`: those that are here, the same ones in every version; None = all.
        """
        if not self._most_steps:
            return
        before, self._last = self._last, (manifest, blob)
        if before is None or not delta.same_layout(before[0], manifest) or before[0].root == manifest.root:
            return
        self.wait(stop=True)  # one that was not ready by now is left as far as it is
        self._steps.pop(manifest.root, None)  # of an earlier time: this one is the newest now
        step = self._steps[manifest.root] = _Step(before[0].root, manifest.root)
        while len(self._steps) > self._most_steps:
            self._steps.popitem(last=False)
        self._ended = threading.Event()
        mine = range(len(manifest.chunk_hashes)) if chunks is None else chunks
        work = (step, before[1], manifest, blob, mine, self._ended)
        self._thread = threading.Thread(target=self._encode, args=work, name="weights-deltas", daemon=True)
        self._thread.start()

    def _encode(
        self, step: _Step, old: memoryview, manifest: Manifest, new: memoryview, chunks: Sequence[int], ended: threading.Event
    ) -> None:
        for chunk in chunks:
            if ended.is_set() or self._nbytes() > self._most:
                return
            start, stop = manifest.chunk_range(chunk)
            made = delta.chain([delta.encode(old[start:stop], new[start:stop], delta.width_of(manifest, chunk))])
            if len(made) <= delta.WORTH * (stop - start):
                step.chunks[chunk] = made
                step.nbytes += len(made)
            self.encoded += 1

    def wait(self, *, stop: bool = False) -> None:
        """Until the newest version's deltas are made, or (`stop`) until their making has ended."""
        if stop:
            self._ended.set()
        if self._thread is not None:
            self._thread.join()
