"""RLBoost's load balancer: which requests leave an instance for which other one. Pure.

    waiting requests        ->  instances whose queue is empty
    max(m_exec - B, 0)      ->  idle instances

Owns the rule and what keeps it from going back and forth. Knows neither when it is asked nor how one learns what is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scavenger.router.policy import Move, SampleView


@dataclass(slots=True)
class Instance:
    """An instance that serves, with its requests. `pending`: not known to be executed; `waiting`: of these, who may go, in order."""

    id: int
    leases: int
    pending: int = 0
    waiting: list[SampleView] = field(default_factory=list)
    executed: list[SampleView] = field(default_factory=list)


class Balancer:
    """`theta`: pending requests an instance may have; `batch`: the paper's B."""

    def __init__(self, theta: int, batch: int) -> None:
        self._theta, self._batch = theta, batch
        self._left: dict[tuple[int, int], int] = {}  # (sample, instance where it waited) -> requests that stayed there

    def forget(self) -> None:
        """Another step: all samples are new."""
        self._left.clear()

    def moves(self, instances: Sequence[Instance]) -> list[Move]:
        """What shall move. Counts of `instances` are brought up to date on the way."""
        empty = [one for one in instances if not one.pending]
        idle = [one for one in empty if not one.leases]
        found = self._waiting(instances, empty)
        return found + self._excess(instances, idle)

    def _waiting(self, instances: Sequence[Instance], empty: Sequence[Instance]) -> list[Move]:
        """From the longest queue first, its last request first; to whom has fewest requests, until queues and numbers are even."""
        found: list[Move] = []
        gave: list[tuple[SampleView, Instance]] = []
        queued = [one for one in instances if one.waiting] if empty else []
        while queued:
            giver = max(queued, key=lambda one: (one.pending, one.leases, -one.id))
            sample = giver.waiting.pop()
            if not giver.waiting:
                queued.remove(giver)

            def gains(taker: Instance, giver: Instance = giver, sample: SampleView = sample) -> bool:
                shorter = taker.pending < giver.pending or taker.leases + 1 < giver.leases
                return shorter and taker.leases < self._left.get((sample.id, taker.id), taker.leases + 1)

            if (taker := self._taker(empty, gains)) is not None:
                reason = f"it is one of {giver.pending} that wait at {giver.id}; the queue of {taker.id} is empty"
                found.append(_move(sample, giver, taker, reason))
                giver.pending -= 1
                gave.append((sample, giver))
        # Back where it waited it would wait again, unless something ended there meanwhile.
        self._left |= {(sample.id, giver.id): giver.leases for sample, giver in gave}
        return found

    def _excess(self, instances: Sequence[Instance], idle: Sequence[Instance]) -> list[Move]:
        """The shortest, which cost least to prefill again; until idle ones have as many as those that give."""
        found: list[Move] = []
        for giver in instances if idle else ():
            excess = max(len(giver.executed) - self._batch, 0)
            for sample in sorted(giver.executed, key=lambda s: (s.prompt_tokens + s.length, s.id))[:excess] if excess else ():
                taker = self._taker(idle, lambda one, giver=giver: one.leases + 1 < giver.leases)  # type: ignore[misc]
                if taker is None:
                    break
                found.append(_move(sample, giver, taker, f"{giver.id} executes more than {self._batch}, {taker.id} none"))
        return found

    def _taker(self, among: Sequence[Instance], gains: Callable[[Instance], bool]) -> Instance | None:
        able = (one for one in among if one.pending < self._theta and gains(one))
        return min(able, key=lambda one: (one.leases, one.id), default=None)


def _move(sample: SampleView, giver: Instance, taker: Instance, reason: str) -> Move:
    giver.leases -= 1
    taker.leases += 1
    taker.pending += 1
    return Move(sample.id, giver.id, taker.id, reason)
