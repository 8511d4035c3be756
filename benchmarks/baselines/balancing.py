"""RLBoost's load balancer: which requests leave an instance for which other one. Pure.

    waiting requests        ->  instances whose queue is empty
    max(m_exec - B, 0)      ->  idle instances

Owns the rule and what keeps it from going back and forth. Knows neither when it is asked nor how one learns what is executed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scavenger.policy.interface import SampleMove, SampleView


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
        self._left: dict[
            tuple[int, int], int
        ] = {}  # (sample, instance where it waited) -> requests that stayed there

    def forget(self) -> None:
        """Another step: all samples are new."""
        self._left.clear()

    def moves(self, instances: Sequence[Instance]) -> list[SampleMove]:
        """What shall move. Counts of `instances` are brought up to date on the way."""
        empty = [one for one in instances if not one.pending]
        idle = [one for one in empty if not one.leases]
        found = self._waiting(instances, empty)
        return found + self._excess(instances, idle)

    def _waiting(self, instances: Sequence[Instance], empty: Sequence[Instance]) -> list[SampleMove]:
        """From the longest queue first, its last request first; to whom has fewest requests, until queues and numbers are even."""
        found: list[SampleMove] = []
        queued = [one for one in instances if one.waiting] if empty else []
        while queued:
            giver = max(queued, key=lambda one: (one.pending, one.leases, -one.id))
            sample = giver.waiting.pop()
            if not giver.waiting:
                queued.remove(giver)
            shorter = [one for one in empty if one.pending < giver.pending or one.leases + 1 < giver.leases]
            # Where it waited before it would wait again, unless something ended there meanwhile.
            taker = self._taker(
                [one for one in shorter if one.leases < self._left.get((sample.id, one.id), math.inf)]
            )
            if taker is not None:
                reason = (
                    f"it is one of {giver.pending} that wait at {giver.id}; the queue of {taker.id} is empty"
                )
                found.append(_move(sample, giver, taker, reason))
                giver.pending -= 1
        leases = {one.id: one.leases for one in instances}
        self._left |= {(move.sample_id, move.from_worker): leases[move.from_worker] for move in found}
        return found

    def _excess(self, instances: Sequence[Instance], idle: Sequence[Instance]) -> list[SampleMove]:
        """The shortest, which cost least to prefill again; until idle ones have as many as those that give."""
        found: list[SampleMove] = []
        for giver in instances:
            excess = max(len(giver.executed) - self._batch, 0) if idle else 0
            for sample in (
                sorted(giver.executed, key=lambda s: (s.prompt_tokens + s.length, s.id))[:excess]
                if excess
                else ()
            ):
                taker = self._taker([one for one in idle if one.leases + 1 < giver.leases])
                if taker is None:
                    break
                found.append(
                    _move(
                        sample, giver, taker, f"{giver.id} executes more than {self._batch}, {taker.id} none"
                    )
                )
        return found

    def _taker(self, among: Sequence[Instance]) -> Instance | None:
        return min(
            (one for one in among if one.pending < self._theta),
            key=lambda one: (one.leases, one.id),
            default=None,
        )


def _move(sample: SampleView, giver: Instance, taker: Instance, reason: str) -> SampleMove:
    giver.leases -= 1
    taker.leases += 1
    taker.pending += 1
    return SampleMove(sample.id, giver.id, taker.id, reason)
