"""Which groups of earlier steps a step trains once more. Pure.

A replayed group keeps the tokens, the behaviour logprobs and the advantages that it had; the step computes its proximal logprobs anew, so
that proximal/behaviour corrects its age as it does that of any older sample. Its samples stay what the first step made of them in the
ledger: they are consumed once, and a replay is a row of `decisions`.

Boundary: ages and weights of groups; no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """`step`: which trained it. `oldest`: the step after which the oldest weights of its tokens were published. `signal`: the mean of its
    samples' |advantage|. `workers`: who generated it."""

    group_id: int
    step: int
    oldest: int
    signal: float
    workers: frozenset[int] = frozenset()

    def age(self, step: int) -> int:
        """Optimizer steps between its oldest weights and those that `step` trains."""
        return step - 1 - self.oldest


@dataclass(frozen=True, slots=True)
class Replay:
    """`taken`: ids of groups, in the order in which they are trained. The others: why they are not."""

    taken: tuple[int, ...]
    too_old: int = 0
    set_aside: int = 0
    beyond_limit: int = 0


def choose(
    kept: Iterable[KeptGroup], step: int, *, limit: int, max_age: int, suspects: Collection[int] = ()
) -> Replay:
    """At most `limit` groups for `step`, each at most `max_age` steps old then: those with the most signal, of equal ones the newest.

    None in which a worker of `suspects` took part. The order of `kept` says nothing.
    """
    groups = sorted(kept, key=_rank)
    young = [one for one in groups if one.age(step) <= max_age]
    sound = [one for one in young if one.workers.isdisjoint(suspects)]
    return Replay(
        tuple(one.group_id for one in sound[:limit]),
        too_old=len(groups) - len(young),
        set_aside=len(young) - len(sound),
        beyond_limit=max(0, len(sound) - limit),
    )


def worth_keeping(kept: Sequence[KeptGroup], step: int, *, limit: int, max_age: int) -> tuple[KeptGroup, ...]:
    """Of what there is before `step`, what any later choice may take: no group that is too old, and the best `limit` of those that are
    too old from the same step on."""
    counts: Counter[int] = Counter()
    found = []
    for one in sorted((one for one in kept if one.age(step) <= max_age), key=_rank):
        counts[one.oldest] += 1
        if counts[one.oldest] <= limit:
            found.append(one)
    return tuple(found)


def _rank(one: KeptGroup) -> tuple[float, int, int]:
    """First is what is trained first."""
    return (-one.signal, -one.step, one.group_id)
