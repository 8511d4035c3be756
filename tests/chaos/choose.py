"""Which faults a chaos run has, and whom each hits: pure functions of the seed and of the processes that are there.

A plan's moments are shares of the undisturbed run's tokens, so one seed asks for the same faults at the same progress on any machine.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

#: Parts of the system that can be killed, and how often each is wished for.
WEIGHTS = {
    "daemon": 3.0,
    "engine": 4.0,
    "rank": 1.5,
    "launcher": 0.5,
    "rewards": 0.5,
    "gateway": 2.0,
    "environment": 3.0,
    "postgres": 2.0,
    "backend": 1.5,
    "slurmctld": 1.0,
}
#: What else can happen to which part.
STOPPABLE = {"daemon": 1.0, "engine": 2.0, "rank": 1.0}
HOLED = {"engine": 2.0, "rank": 1.0}
NOTICED = {"engine": 1.0}  # told to leave, as Slurm does that gives notice
KINDS = ("kill", "stop", "hole", "disk", "notice")
#: One of these for so many kills.
KILLS_FOR_ONE = {"stop": 8, "hole": 8, "disk": 25, "notice": 1}
FIRST, LAST = 0.02, 0.92
MOST_DELAY_S, MOST_AWAY_S = 0.6, 4.0


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the site. `name` says which of its part it is; `start` (clock ticks) tells a reused pid from it."""

    part: str
    name: str
    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault to come. `at`: share of the undisturbed run's tokens; then `delay_s` more. `pick` in [0, 1) chooses a process of the part.

    `away_s`: how long what was killed, stopped or cut off stays so at least. `coin`: of a hole, whether what it held is delivered late;
    of a stopped rank 0, whether the job is submitted again beside it.
    """

    number: int
    kind: str
    part: str
    at: float
    delay_s: float
    pick: float
    away_s: float
    coin: bool


def plan(seed: int, kills: int, kinds: Collection[str], parts: Collection[str]) -> tuple[Planned, ...]:
    """`kills` kills of `parts`, and of the other kinds as `KILLS_FOR_ONE` says (at least one each), in the order of their moments."""
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"unknown faults {sorted(unknown)}: choose among {', '.join(KINDS)}")
    dice = random.Random(f"chaos {seed}")
    wanted = [("kill", part) for part in _parts(dice, WEIGHTS, parts, kills if "kill" in kinds else 0)]
    others = (("stop", STOPPABLE), ("hole", HOLED), ("disk", {"disk": 1.0}), ("notice", NOTICED))
    for kind, weights in others:
        count = max(1, kills // KILLS_FOR_ONE[kind]) if kind in kinds else 0
        wanted += [(kind, part) for part in _parts(dice, weights, {*parts, "disk"}, count)]
    dice.shuffle(wanted)
    moments = sorted(dice.uniform(FIRST, LAST) for _ in wanted)
    return tuple(
        Planned(
            number,
            kind,
            part,
            at,
            dice.uniform(0.0, MOST_DELAY_S),
            dice.random(),
            MOST_AWAY_S * dice.random() ** 2,
            dice.random() < 0.5,
        )
        for number, ((kind, part), at) in enumerate(zip(wanted, moments, strict=True), 1)
    )


def _parts(
    dice: random.Random, weights: Mapping[str, float], parts: Collection[str], count: int
) -> list[str]:
    """`count` parts: each of them once before any chance, so that few kills hit many parts."""
    there = [part for part in weights if part in parts]
    if not there:
        return []
    each = sorted(there, key=lambda part: (-weights[part], part))[:count]
    return each + dice.choices(there, [weights[part] for part in there], k=count - len(each))


def target(fault: Planned, observed: Sequence[Process], *, any_part: bool = False) -> Process | None:
    """Whom the fault hits; None while no process of its part is there. `any_part`: it was waited for in vain, so take another."""
    there = sorted(
        (p for p in observed if any_part or p.part == fault.part), key=lambda p: (p.part, p.name, p.pid)
    )
    return there[int(fault.pick * len(there))] if there else None
