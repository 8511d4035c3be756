"""One engine's batch with samples of two runs: the run whose engine it is, and the one that borrows slots of it.

    lender's SimEngine ----> BatchPart --.
                                          > SharedBatch > EngineBatch, whose decode model counts all samples alike
    borrower's SimEngine --> BatchPart --'

So a step costs what the sum of both runs' samples and tokens costs, a prefill of either stalls both, and one KV cache holds both. What the
adapters of two runs cost a pass more than those of one is left out. The engine serves its queue in order: live, requests of the run whose
engine it is go first. Owns whose a sample is, and what of it was not told yet. What is counted of the engine (tokens, prefills) is the
lender's.

Boundary: one engine's batch; it knows no loan and no run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from scavenger.simulate.sequences import EngineBatch, Finished, Happening, Joined, Preempted, SimulatedRequest


class SharedBatch:
    """See the module. `changed`: the other part's, called when what one part did moved the batch's next event."""

    def __init__(self, batch: EngineBatch, lender_changed: Callable[[], None]) -> None:
        self.batch = batch
        self.lender = BatchPart(self, borrows=False, changed=lender_changed)
        self.borrower = BatchPart(self, borrows=True)

    def take(self, now: float) -> None:
        """What happened until now, to the part whose sample it is."""
        for one in self.batch.advance(now):
            if isinstance(one, Joined):
                for part in (self.lender, self.borrower):
                    if mine := tuple(part.own(key) for key in one.keys if part.has(key)):
                        part.unread.append(msgspec.structs.replace(one, keys=mine))
                continue
            part = self.borrower if self.borrower.has(one.key) else self.lender
            part.unread.append(msgspec.structs.replace(one, key=part.own(one.key)))

    def moved_by(self, part: BatchPart) -> None:
        other = self.lender if part is self.borrower else self.borrower
        other.changed()


class BatchPart:
    """One run's samples in it, as `EngineBatch` has them. Keys and prompts below 0 are the borrower's.

    A sample that ended while the other part moved the time has all but its last token until its own engine reads that: what the daemon asks
    of it meanwhile has an answer."""

    def __init__(
        self, shared: SharedBatch, *, borrows: bool, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._shared, self._batch, self._borrows, self.changed = shared, shared.batch, borrows, changed
        self.unread: list[Happening] = []
        self._counts = not borrows  # what is counted of the engine

    @property
    def whole(self) -> EngineBatch:
        """The engine's."""
        return self._batch

    def has(self, key: int) -> bool:
        return (key < 0) == self._borrows

    def own(self, key: int) -> int:
        """The key, or the prompt, as its engine knows it, or as the batch does."""
        return -1 - key if self._borrows else key

    # ---------------------------------------------------------------- what `EngineBatch` tells

    @property
    def size(self) -> int:
        """The engine works for its lender while it works for anybody: its GPUs are busy."""
        if self._counts:
            return self._batch.size
        return sum(self.has(key) for key in self._batch)

    @property
    def room(self) -> int:
        return self._batch.room

    @property
    def running(self) -> int:
        return self._batch.running

    @property
    def decoded_tokens(self) -> int:
        return self._batch.decoded_tokens if self._counts else 0

    @property
    def prefilled_tokens(self) -> int:
        return self._batch.prefilled_tokens if self._counts else 0

    @property
    def prefill_s(self) -> float:
        return self._batch.prefill_s if self._counts else 0.0

    @property
    def preemptions(self) -> int:
        return self._batch.preemptions if self._counts else 0

    def __contains__(self, key: int) -> bool:
        return self.own(key) in self._batch

    def is_running(self, key: int) -> bool:
        return self._batch.is_running(self.own(key))

    def next_time(self) -> float:
        return -1.0 if self.unread else self._batch.next_time()

    def generated(self, key: int, now: float) -> int:
        self._shared.take(now)
        if (ended := self._ended(key)) is not None:
            return ended.generated - 1
        return self._batch.generated(self.own(key), now)

    def progress(self, now: float) -> dict[int, int]:
        self._shared.take(now)
        lengths = {
            self.own(key): length for key, length in self._batch.progress(now).items() if self.has(key)
        }
        return lengths | {one.key: one.generated - 1 for one in self.unread if isinstance(one, Finished)}

    def _ended(self, key: int) -> Finished | None:
        return next((one for one in self.unread if isinstance(one, Finished) and one.key == key), None)

    # ---------------------------------------------------------------- what moves it

    def advance(self, now: float) -> list[Happening]:
        self._shared.take(now)
        happened, self.unread = self.unread, []
        self._shared.moved_by(self)
        return happened

    def add(self, requests: Iterable[SimulatedRequest], now: float) -> None:
        own, replaced = self.own, msgspec.structs.replace
        self._shared.take(now)
        self._batch.add([replaced(one, key=own(one.key), prompt=own(one.prompt)) for one in requests], now)
        self._shared.moved_by(self)

    def remove(self, key: int, now: float) -> int:
        self._shared.take(now)
        ended = self._ended(key)
        self.unread = [one for one in self.unread if not _is_of(one, key)]
        length = ended.generated if ended is not None else self._batch.remove(self.own(key), now)
        self._shared.moved_by(self)
        return length

    def sibling_ended(self, prompt: int, now: float) -> None:
        """Runs that share engines do not speculate."""


def _is_of(one: Happening, key: int) -> bool:
    return isinstance(one, Finished | Preempted) and one.key == key
