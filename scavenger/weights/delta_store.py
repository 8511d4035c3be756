"""The deltas that a process can send: from each of the last versions to the next. They outlive the versions' own bytes.

Owns the encoded deltas (`Chains`), and the thread of a publisher that makes them beside training (`Encoder`), where measured rates say that
a receiver gains time by them (`choice.encoding_pays`). An engine makes none: it keeps those that it was sent, once what they made had the
right hash, and gives them on. A request for which there is none (yet) is answered with the whole chunk; a receiver that would have a
version sooner by waiting is told how many are still to be made. Knows no socket.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from scavenger.weights import choice, delta
from scavenger.weights.choice import MeasuredRate, ReceiverReport
from scavenger.weights.manifest import Manifest
from scavenger.weights.protocol import OfferedDeltas

MOST_NBYTES = 4 << 30
_SHARE = 0.1  # of a version's bytes that its deltas are expected to have, before any were made
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Step:
    """From one version's weights to those of a later one: a chain for each chunk."""

    parent: bytes
    root: bytes
    chunks: dict[int, bytes] = field(default_factory=dict)
    nbytes: int = 0
    left: int = 0  # chunks that are still to be encoded


class Chains:
    """The last `steps` steps, in at most `nbytes`: the oldest are dropped first, and what still does not fit is not kept. Thread-safe."""

    def __init__(self, steps: int, nbytes: int = MOST_NBYTES) -> None:
        self.steps = steps
        self._most = nbytes
        self._steps: OrderedDict[bytes, _Step] = OrderedDict()  # by the root that a step leads to
        self._nbytes = 0  # of all steps
        self._lock = threading.Lock()
        self.used = 0

    def begin(self, parent: bytes, root: bytes, chunks: int = 0) -> None:
        """Begin the newest step, of which so many chunks are to be encoded. An older step to the same weights is dropped."""
        with self._lock:
            self._begin(parent, root).left = chunks

    def looked_at(self, root: bytes) -> None:
        """One more chunk of this step was encoded, and is here unless it was not worth it."""
        with self._lock:
            step = self._steps.get(root)
            if step is not None:
                step.left = max(0, step.left - 1)

    def begun_no_more(self, root: bytes) -> None:
        """No further chunk of this step is encoded: nobody waits for one."""
        with self._lock:
            step = self._steps.get(root)
            if step is not None:
                step.left = 0

    def offer(
        self,
        parent: bytes,
        root: bytes,
        chunks: int,
        chunk_nbytes: int,
        share: float = _SHARE,
        encoding: float = 0.0,
    ) -> OfferedDeltas | None:
        """What pulling `chunks` chunks by deltas from the parent's weights takes; None where no chain leads there.

        `share`: of the whole bytes, expected where none is made yet. `encoding`: bytes a second at which the rest is made.
        """
        with self._lock:
            path: list[_Step] = []
            at = root
            while at != parent:
                step = self._steps.get(at)
                if step is None or len(path) >= self.steps:
                    return None
                path.append(step)
                at = step.parent
            if not path:
                return None
            left = min(chunks, max(step.left for step in path))
            seen = chunks - left
            whole = seen - min(seen, *(len(step.chunks) for step in path))
            nbytes = sum(step.nbytes for step in path) + whole * chunk_nbytes
        if not seen:
            seen, nbytes = chunks, int(share * chunks * chunk_nbytes)
        of_nbytes = seen * chunk_nbytes
        return OfferedDeltas(min(nbytes, of_nbytes), of_nbytes, len(path), left * chunk_nbytes, encoding)

    def _begin(self, parent: bytes, root: bytes) -> _Step:
        self._forget(root)
        step = self._steps[root] = _Step(parent, root)
        while len(self._steps) > self.steps:
            self._forget(next(iter(self._steps)))
        return step

    def add(self, parent: bytes, root: bytes, chunk: int, encoded: bytes) -> bool:
        """A chunk's chain from the parent's weights that makes the right bytes. False where there is no room for it."""
        with self._lock:
            step = self._steps.get(root)
            if step is None or step.parent != parent:
                step = self._begin(parent, root)
            if chunk in step.chunks:
                return True
            while (
                self._steps
                and self._nbytes + len(encoded) > self._most
                and (oldest := next(iter(self._steps))) != root
            ):
                self._forget(oldest)
            if root not in self._steps or self._nbytes + len(encoded) > self._most:
                return False
            step.chunks[chunk] = encoded
            step.nbytes += len(encoded)
            self._nbytes += len(encoded)
            return True

    def _forget(self, root: bytes) -> None:
        step = self._steps.pop(root, None)
        self._nbytes -= step.nbytes if step is not None else 0

    def bound(self, nbytes: int) -> None:
        """Keep at most this many bytes, from the next delta on."""
        with self._lock:
            self._most = nbytes

    def find(self, parent: bytes, root: bytes, chunk: int, nbytes: int) -> bytes | None:
        """The chunk's chain from the parent's weights; None where there is none, or where sending the whole chunk is cheaper."""
        with self._lock:
            found = self._found(parent, root, chunk)
            if (
                not found
                or sum(map(len, found)) > delta.WORTH * nbytes
                or sum(map(delta.links, found)) > delta.MOST_LINKS
            ):
                return None
            self.used += 1
        return b"".join(found[::-1])

    def _found(self, parent: bytes, root: bytes, chunk: int) -> list[bytes]:
        """The chains of the steps in between, the last step first; empty where one is missing."""
        found: list[bytes] = []
        at = root
        while at != parent:
            step = self._steps.get(at)
            made = step.chunks.get(chunk) if step is not None else None
            if (
                step is None or made is None or len(found) >= self.steps
            ):  # weights that came back, A -> B -> A, lead round for ever
                return []
            found.append(made)
            at = step.parent
        return found


class Encoder:
    """Adds the step from each version to the next to `chains`, as they are published."""

    def __init__(self, chains: Chains, clock: Callable[[], float] = time.monotonic) -> None:
        self._chains, self._clock = chains, clock
        self._last: tuple[Manifest, memoryview] | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._reports: deque[ReceiverReport] = deque(maxlen=choice.REPORTS)
        self._skipped = 0  # versions in a row whose deltas were not made
        self.rate = MeasuredRate(choice.ENCODING_NBYTES_PER_S)
        self.share = _SHARE  # of the whole bytes, that the deltas of the last version had

    def heard(self, report: ReceiverReport) -> None:
        """A receiver asked for a version, and told what it measured."""
        with self._lock:
            self._reports.append(report)

    def published(self, manifest: Manifest, blob: memoryview, chunks: Sequence[int] | None = None) -> None:
        """The next version; its deltas from the one before are made from here on, where they are of use. Both must stay as they are
        meanwhile.

        `chunks`: those that are here, the same ones in every version; None = all.
        """
        before, self._last = self._last, (manifest, blob)
        if before is None or not delta.same_layout(before[0], manifest) or before[0].root == manifest.root:
            return
        self.wait(stop=True)  # one that was not ready by now is left as far as it is
        mine = range(len(manifest.chunk_hashes)) if chunks is None else chunks
        with self._lock:
            reports = tuple(self._reports)
        full = manifest.total_nbytes
        own = min(len(mine) * manifest.chunk_nbytes, full)
        found = choice.encoding_pays(full, own, self.share, self.rate, reports, self._skipped)
        _log.info("weights.deltas", version=manifest.version, made=found.encode, reason=found.reason)
        self._skipped = 0 if found.encode else self._skipped + 1
        if not found.encode:
            return
        self._chains.begin(before[0].root, manifest.root, len(mine))
        self._ended = threading.Event()
        work = (before, (manifest, blob), mine, self._ended)
        self._thread = threading.Thread(target=self._encode, args=work, name="weights-deltas", daemon=True)
        self._thread.start()

    def _encode(
        self,
        old: tuple[Manifest, memoryview],
        new: tuple[Manifest, memoryview],
        chunks: Sequence[int],
        ended: threading.Event,
    ) -> None:
        manifest, began = new[0], self._clock()
        whole = sent = 0
        for chunk in chunks:
            if ended.is_set():
                break
            start, stop = manifest.chunk_range(chunk)
            made = delta.chain(
                [delta.encode(old[1][start:stop], new[1][start:stop], delta.width_of(manifest, chunk))]
            )
            worth = len(made) <= delta.WORTH * (stop - start)
            whole, sent = whole + stop - start, sent + (len(made) if worth else stop - start)
            self.rate = self.rate.measured(stop - start, max(self._clock() - began, 1e-9))
            began = self._clock()
            if worth and not self._chains.add(old[0].root, manifest.root, chunk, made):
                break  # there is room for no more
            self._chains.looked_at(manifest.root)
        self._chains.begun_no_more(manifest.root)
        if whole:
            self.share = sent / whole

    def wait(self, *, stop: bool = False) -> None:
        """Wait until the newest version's deltas are made; with `stop`, until the thread that makes them has ended."""
        if stop:
            self._ended.set()
        if self._thread is not None:
            self._thread.join()
