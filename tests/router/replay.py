"""The log of a core's events, and a core that is made again from it: nothing but events may have changed the first one.

`recording` puts a recorder where a module makes its router; `replayed` handles the log anew, compares each event's actions, and
`dump` shows both cores' tables as plain values. The log is pickled as it is written: an event that is not plain data fails.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import pytest

from scavenger.policy.interface import NewPolicy
from scavenger.protocol.messages import Chunk
from scavenger.router.core.events import RouterAction, RouterEvent
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import NoPayloads
from scavenger.router.core.state import ActiveRun, Group, Queue, RouterLimits, Sample, Worker

#: What a reader may fill: made anew from the tables whenever it is asked for. And what the driver gives.
CACHES = frozenset({"seen", "slots", "serving"})
#: Rows that name each other: dumped where they are met first.
CYCLIC = (ActiveRun, Group, Sample, Worker)
GIVEN = frozenset({"payloads", "new_policy"})


class Recorder(Router):
    """A router that keeps what it was given, what it answered, and what its payload store said of resends."""

    def __init__(
        self,
        limits: RouterLimits,
        generation: int,
        payloads: Any,
        ledger: str = "",
        restored: bool = False,
        new_policy: NewPolicy | None = None,
    ) -> None:
        super().__init__(limits, generation, payloads, ledger, restored, new_policy)
        self.made_of = (limits, int(generation), ledger, restored)
        self.policy_of = new_policy
        self.log: list[tuple[bytes, list[RouterAction]]] = []
        self.compared: list[bool] = []
        same = payloads.same

        def compare(sample_id: int, chunk: Chunk, known: int) -> bool:
            self.compared.append(same(sample_id, chunk, known))
            return self.compared[-1]

        payloads.same = compare

    def handle(self, event: RouterEvent, now: float) -> list[RouterAction]:
        written = pickle.dumps((event, now))
        actions = super().handle(event, now)
        self.log.append((written, list(actions)))
        return actions

    def kinds(self) -> set[str]:
        return {type(pickle.loads(written)[0]).__name__ for written, _ in self.log}  # noqa: S301  # our own


class _Compared(NoPayloads):
    """Says of each resend what the recorded store said."""

    def __init__(self, answers: list[bool]) -> None:
        self.answers = deque(answers)

    def same(self, sample_id: int, chunk: Chunk, known: int) -> bool:
        return self.answers.popleft()


def recording(monkeypatch: pytest.MonkeyPatch, *modules: str) -> list[Recorder]:
    """Every router that one of these modules makes from now on."""
    made: list[Recorder] = []

    def make(*of: Any, **options: Any) -> Recorder:
        made.append(Recorder(*of, **options))
        return made[-1]

    for module in modules:
        monkeypatch.setattr(f"{module}.Router", make)
    return made


def replayed(recorder: Recorder) -> Router:
    """Another core from the same log; raises AssertionError at the first event whose actions are others."""
    limits, generation, ledger, restored = recorder.made_of
    store = _Compared(recorder.compared)
    router = Router(limits, generation, store, ledger, restored, recorder.policy_of)
    for number, (written, actions) in enumerate(recorder.log):
        event, now = pickle.loads(written)  # noqa: S301  # our own
        again = router.handle(event, now)
        assert again == actions, f"event {number}, {event}: {again} instead of {actions}"
    assert not store.answers
    return router


def dump(router: Router) -> Any:
    """The core's tables, and all that they lead to, as plain values. What is met again is named by its number."""
    return _dump(router.core, {}, [])


def _dump(value: Any, seen: dict[int, int], alive: list[Any]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, CYCLIC):
        if id(value) in seen:
            return ("again", seen[id(value)])
        seen[id(value)] = len(seen)
        alive.append(value)  # or another could get its id

    def of(part: Any) -> Any:
        return _dump(part, seen, alive)

    if isinstance(value, Mapping):
        return [(of(key), of(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [of(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(part) for part in value)
    if isinstance(value, Queue):
        waiting = [[sample.id for sample in value.waiting(v)] for v in sorted(value.versions())]
        return ("queue", value.came, waiting)
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    if not type(value).__module__.startswith("scavenger"):
        return repr(value)  # one that says where it lies is equal to no other: it needs a case here
    return (type(value).__name__, {name: of(getattr(value, name)) for name in _fields(value)})


def _fields(value: Any) -> Iterator[str]:
    names = [*getattr(value, "__dict__", ())]
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    yield from (name for name in sorted({*names} - CACHES - GIVEN) if hasattr(value, name))
