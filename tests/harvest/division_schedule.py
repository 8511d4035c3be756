"""Random fleets that are divided poll by poll, under random shares, caps and floors; every decision is checked. And bugs to plant.

`play(seed)` raises `AssertionError` with the first thing that does not hold:

    each decision   no cap is exceeded; no engine leaves before `hold_s`, or before it registered where it still may; value and other runs'
                    floors take nothing below a floor;
                    the numbers of every run are in it, and each engine that leaves has its reason
    all of them     no run waits for its first engine beyond the bound that `divide` states
    once all want   a run of engines of one GPU has its floor, and with `floor = 1` its share
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from scavenger.policy import division
from scavenger.policy.division import (
    Bid,
    Division,
    DivisionRules,
    HeldEngine,
    entitlements,
    floor_of,
    values_of,
    weights,
)
from tests.harvest.test_division import POLL_S, Played, benefit

GPUS = 8  # of a node
WAITED = ("has waited for", "is kept for run")  # why an engine leaves that a floor does not hold


@dataclass
class Watched(Played):
    """A fleet of which each decision is checked. `left`, `below`: engines that left for others, and runs seen below their floors."""

    left: int = 0
    below: int = 0
    floors: dict[int, int] = field(default_factory=dict)

    def decided(self, bids: list[Bid], known: list[HeldEngine], idle: int, found: Division) -> None:
        self._caps(bids, found)
        self.floors = self._floors(bids, known, idle)
        has = Counter(one.run_id for one in known)
        self.below += sum(has[run_id] < floor for run_id, floor in self.floors.items())
        self._leaving(bids, known, found)
        self._numbers(bids, has, found)

    def _caps(self, bids: list[Bid], found: Division) -> None:
        engines = sum(found.engines.values())
        gpus = sum(found.engines[one.run_id] * one.all_gpus for one in bids)
        assert engines <= self.most_engines, f"{engines} engines, over the cap of {self.most_engines}"
        assert self.most_gpus is None or gpus <= self.most_gpus, (
            f"{gpus} GPUs, over the cap of {self.most_gpus}"
        )

    def _floors(self, bids: list[Bid], known: list[HeldEngine], idle: int) -> dict[int, int]:
        largest = max((one.all_gpus for one in bids if one.engines), default=0)
        gpus = sum(one.gpus for one in known) + idle
        gpus = min(gpus, self.most_engines * largest, *(() if self.most_gpus is None else (self.most_gpus,)))
        share = entitlements(bids, gpus)
        return {one.run_id: floor_of(one, share[one.run_id], self.rules.floor) for one in bids if one.engines}

    def _leaving(self, bids: list[Bid], known: list[HeldEngine], found: Division) -> None:
        engines, names = {one.intent_id: one for one in known}, {one.run_id: one.run for one in bids}
        self.left += len(found.leaving)
        for intent_id, reason in found.leaving.items():
            one = engines[intent_id]
            assert one.age_s >= self.rules.hold_s, (
                f"{intent_id} leaves {one.age_s:.0f} s old, before its time"
            )
            assert not one.registers_s, f"{intent_id} leaves before it registered"
            others = [name for run_id, name in names.items() if run_id != one.run_id]
            assert any(f"run {name} " in reason or f"run {name}," in reason for name in others), (
                f"{intent_id} leaves for no run by name: {reason!r}"
            )
            if any(word in reason for word in WAITED):
                continue
            gets, floor = found.engines[one.run_id], self.floors.get(one.run_id, 0)
            assert gets >= floor, (
                f"run {names[one.run_id]} gets {gets} engines, below its floor of {floor}: {reason}"
            )

    def _numbers(self, bids: list[Bid], has: Counter[int], found: Division) -> None:
        rows, weight = {str(row["run"]): row for row in found.rows}, weights(bids)
        for one in (one for one in bids if one.engines):
            gets, worth = found.engines[one.run_id], values_of(one, weight[one.run_id])
            wanted: dict[str, object] = {
                "owner": one.owner,
                "share": one.share,
                "wants": one.engines,
                "has": has[one.run_id],
                "gets": gets,
                "gpus": one.all_gpus,
                "floor": self.floors[one.run_id],
                "last": pytest.approx(worth[gets - 1] if gets else 0.0, abs=1e-5),
                "next": pytest.approx(worth[gets] if gets < one.engines else 0.0, abs=1e-5),
                "waited_s": pytest.approx(one.waited_s, abs=0.1),
            }
            assert 0 <= gets <= one.engines, f"run {one.run} wants {one.engines} engines and gets {gets}"
            row = rows.get(one.run, {})
            wrong = [name for name, number in wanted.items() if row.get(name) != number]
            assert not wrong, (
                f"run {one.run}: of its numbers {wrong} are {[row.get(name) for name in wrong]}, "
                f"and by shares, values and jobs {[wanted[name] for name in wrong]}"
            )
            assert f"run {one.run} gets {gets} of {one.engines} engines" in found.reason, found.reason


def _runs(draw: random.Random, count: int, sizes: list[int]) -> list[Bid]:
    shares = {owner: draw.randint(1, 7) for owner in "abcd"[: draw.randint(1, 4)]}
    bids = []
    for run_id in range(count):
        owner, gpus = draw.choice(sorted(shares)), draw.choice(sizes)
        known = benefit(draw.uniform(0.0, 99.0), draw.choice([1.0, 8.0, 64.0]), gpus)
        given = known if draw.random() < 0.8 else None
        bids.append(Bid(run_id, f"run{run_id}", 20, gpus, owner, shares[owner], given))
    return bids


def play(seed: int, polls: int = 60) -> Watched:
    """Play one schedule."""
    draw = random.Random(seed)
    nodes, count = draw.randint(1, 4), draw.randint(2, 7)
    small = seed % 2 == 0
    rules = DivisionRules(
        draw.choice([0.0, 0.5, 0.9, 0.95, 1.0]),
        draw.choice([300.0, 600.0]),
        draw.choice([60.0, 300.0]),
        1800.0,
        draw.choice([1.0, 1.25, 2.0]),
    )
    played = Watched({f"n{n}": GPUS for n in range(nodes)}, rules)
    played.registers_s = random.Random(f"registers {seed}").choice([0.0, 120.0])
    runs = _runs(draw, count, [1] if small else [1, 2, 8])
    for _ in range(polls):
        if draw.random() < 0.25:
            at = draw.randrange(count)
            runs[at] = replace(runs[at], engines=draw.choice([0, 1, 4, 20]))
        if draw.random() < 0.05:
            played.most_engines = draw.choice([count, 2 * count, 10**6])
            played.most_gpus = draw.choice([None, GPUS, 3 * GPUS])
        played.poll(runs, POLL_S)
    bound = rules.wait_s + count * (max(rules.hold_s, played.registers_s) + 2 * POLL_S)
    assert played.most_wait_s <= bound, (
        f"a run waited {played.most_wait_s:.0f} s for an engine, over {bound:.0f}"
    )
    if small:
        _settle(played, [replace(one, engines=20) for one in runs])
    return played


def _settle(played: Watched, runs: list[Bid]) -> None:
    """All want engines, and nothing changes any more: each gets what is its own."""
    for _ in range(30):
        found = played.poll(runs, max(POLL_S, played.rules.hold_s / 4))
    for one in runs:
        gets, floor = found.engines[one.run_id], played.floors[one.run_id]
        waits = any(word in reason for reason in found.leaving.values() for word in WAITED)
        assert gets >= floor or waits or found.kept, (
            f"run {one.run} of owner {one.owner}, share {one.share}, has {gets} engines in the end, "
            f"below its floor of {floor}"
        )


# ---------------------------------------------------------------- planted bugs


def _deal(patch: pytest.MonkeyPatch, name: str, of: Callable[..., Any]) -> None:
    """In place of a method of the dealer: `of` takes the method, the dealer and what the method takes."""
    method = getattr(division._Deal, name)
    patch.setattr(division._Deal, name, lambda deal, *args: of(method, deal, *args))


def floor_ignored(patch: pytest.MonkeyPatch) -> None:
    """What a run keeps for its floor may leave for whoever saves more."""

    def movable(method: Any, deal: Any, taker: Any, rank: int) -> Any:
        floors = {run_id: run.floor for run_id, run in deal.runs.items()}
        for run in deal.runs.values():
            run.floor = 0
        found = method(deal, taker, rank)
        for run_id, run in deal.runs.items():
            run.floor = floors[run_id]
        return found

    _deal(patch, "_movable", movable)


def floor_never_filled(patch: pytest.MonkeyPatch) -> None:
    """A run below its floor is given nothing that another one has: it waits for idle GPUs."""
    _deal(
        patch,
        "_losers",
        lambda method, deal, taker, rank: (
            None if rank == division._BELOW_FLOOR else method(deal, taker, rank)
        ),
    )


def cap_ignored(patch: pytest.MonkeyPatch) -> None:
    _deal(patch, "_within_caps", lambda _method, _deal, _engines, _gpus: True)


def starved_passed_over(patch: pytest.MonkeyPatch) -> None:
    """Who has waited for too long comes in its turn, like everybody."""
    _deal(patch, "_starves", lambda _method, _deal, _run: False)


def share_of_each_run(patch: pytest.MonkeyPatch) -> None:
    """An owner has its share once for every run: many runs, many shares."""
    patch.setattr(
        division,
        "entitlements",
        lambda bids, gpus: entitlements([replace(one, owner=one.run) for one in bids], gpus),
    )


def young_engine_taken(patch: pytest.MonkeyPatch) -> None:
    """Engines leave that have just started: every poll may undo the one before."""
    init = division._Deal.__post_init__

    def aged(deal: Any) -> None:
        init(deal)
        deal.held = [replace(one, age_s=one.age_s + deal.rules.hold_s) for one in deal.held]

    patch.setattr(division._Deal, "__post_init__", aged)


def unregistered_engine_taken(patch: pytest.MonkeyPatch) -> None:
    """An engine whose job has started counts as one that is there."""
    patch.setattr(DivisionRules, "stays_s", lambda rules, one: rules.hold_s - one.age_s)


def numbers_of_before(patch: pytest.MonkeyPatch) -> None:
    """The decision names what runs had, in place of what they get."""

    def stale(method: Any, deal: Any) -> Division:
        found: Division = method(deal)
        rows: tuple[Mapping[str, float | str], ...] = tuple({**row, "gets": row["has"]} for row in found.rows)
        return replace(found, rows=rows)

    _deal(patch, "result", stale)


#: Each bug with what is said when it is found for its own reason, and a schedule that is known to find it, which is tried first.
DIVISION_PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, int]] = {
    plant.__name__: (plant, says, seed)
    for plant, says, seed in (
        (floor_ignored, "below its floor of .: one of run|below its floor of .: run", 5),
        (floor_never_filled, "in the end, below its floor", 8),
        (cap_ignored, "over the cap of", 0),
        (starved_passed_over, "a run waited", 1),
        (share_of_each_run, r"of its numbers \['floor'\]", 3),
        (young_engine_taken, "before its time", 0),
        (unregistered_engine_taken, "before it registered", 6),
        (numbers_of_before, r"of its numbers \['gets'\]", 0),
    )
}
