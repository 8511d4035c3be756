"""The deltas that a publisher can give: from each of the last versions to the next, made beside training, kept when the bytes are gone.

Owns the encoded deltas and the choice between a chain and the whole chunk. Knows no socket. A version's deltas are encoded by one thread
of its own; a request that comes before its chunk is encoded is answered with the whole chunk, so nobody waits for a delta.
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
    """From one version's weights to the next's."""

    parent: bytes
    root: bytes
    chunks: dict[int, bytes] = field(default_factory=dict)
    nbytes: int = 0


class Deltas:
    """The last `links` steps. `nbytes` of encoded chunks are kept at most; what would go beyond is sent whole."""

    def __init__(self, links: int, nbytes: int = 4 << 30) -> None:
        self._links = min(links, delta.MOST_LINKS)
        self._most = nbytes
        self._steps: OrderedDict[bytes, _Step] = OrderedDict()  # by the root that a step leads to
        self._last: tuple[Manifest, memoryview] | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.encoded = self.used = 0

    def published(self, manifest: Manifest, blob: memoryview, chunks: Sequence[int] | None = None) -> None:
        """The next version; its deltas from the one before are made from here on. Both must stay as they are meanwhile.

        `chunks`: those that are here, the same ones in every version; None = all.
        """
        if not self._links:
            return
        before, self._last = self._last, (manifest, blob)
        if before is None or not delta.same_layout(before[0], manifest) or before[0].root == manifest.root:
            return
        self.wait(stop=True)  # one that was not ready by now is left as far as it is
        self._steps.pop(manifest.root, None)  # of an earlier time: this one is the newest now
        step = self._steps[manifest.root] = _Step(before[0].root, manifest.root)
        while len(self._steps) > self._links:
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
            if ended.is_set() or sum(one.nbytes for one in list(self._steps.values())) > self._most:
                return
            start, stop = manifest.chunk_range(chunk)
            made = delta.encode(old[start:stop], new[start:stop], delta.width_of(manifest, chunk))
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

    def find(self, parent: bytes, root: bytes, chunk: int, nbytes: int) -> bytes | None:
        """The chunk's chain from the parent's weights, where there is one and it is worth its while."""
        found: list[bytes] = []
        at = root
        while at != parent:
            if len(found) >= self._links:  # weights that came back, A -> B -> A, lead round for ever
                return None
            step = self._steps.get(at)
            made = step.chunks.get(chunk) if step is not None else None
            if step is None or made is None:
                return None
            found.append(made)
            at = step.parent
        if not found or sum(map(len, found)) > delta.WORTH * nbytes:
            return None
        self.used += 1
        return delta.chain(found[::-1])
