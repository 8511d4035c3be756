"""How GPUs are divided among runs by value: what each decision gives, and that no run starves, in random schedules."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.harvest.decide.actions import (
    Cancel,
    Caps,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestDecision,
    HarvestLimits,
    OurJob,
    OwnerRule,
    Submit,
)
from scavenger.harvest.decide.decide import decide
from scavenger.harvest.decide.division import REGISTERS_S
from scavenger.policy.division import (
    Bid,
    Division,
    DivisionRules,
    HeldEngine,
    divide,
    entitlements,
    floor_of,
    savings,
    values_of,
)
from scavenger.policy.fleet_size import Benefit, Demand
from tests.harvest.test_yielding import LIMITS, NOW, engine, listed
from tests.harvest.views import view

RULES = DivisionRules(floor=0.9, wait_s=600.0, hold_s=300.0, horizon_s=1800.0, margin=1.25)


def curve(alone_s: float, work: float, most: int) -> tuple[tuple[int, float], ...]:
    """A step of which `work` seconds are generation that n engines share with the run's own GPUs."""
    return tuple((n, alone_s - work + work / (1 + n)) for n in (0, 1, 2, 4, 8, 16, 32, 64) if n <= most)


def benefit(work: float = 80.0, run_gpus: float = 8.0, gpus: int = 1, start_s: float = 60.0) -> Benefit:
    return Benefit(0.05, run_gpus, gpus, start_s, curve=curve(100.0, work, 64))


@dataclass
class Nodes:
    """`Space` over nodes of which only GPUs count."""

    free: dict[str, int]
    shut: set[str] = field(default_factory=set)

    def take(self, bid: Bid, nodes: frozenset[str] | None = None) -> tuple[str, ...] | None:
        allowed = self.open(bid) if nodes is None else self.open(bid) & nodes
        fit = sorted((self.free[name], name) for name in allowed if self.free[name] >= bid.gpus)
        if len(fit) < bid.n_nodes:
            return None
        for _, name in fit[: bid.n_nodes]:
            self.free[name] -= bid.gpus
        return tuple(name for _, name in fit[: bid.n_nodes])

    def give_up(self, node: str, gpus: int) -> None:
        self.free[node] += gpus

    def idle(self, node: str) -> int:
        return self.free[node] if node not in self.shut else 0

    def open(self, bid: Bid) -> frozenset[str]:
        return frozenset(self.free) - self.shut

    def close(self, node: str) -> None:
        self.shut.add(node)

    @property
    def gpus(self) -> int:
        return sum(gpus for node, gpus in self.free.items() if node not in self.shut)


def bid(run_id: int, engines: int = 64, gpus: int = 1, **more: object) -> Bid:
    given_ = {"owner": f"owner{run_id}", "benefit": benefit(gpus=gpus), **more}
    return Bid(run_id, f"run{run_id}", engines, gpus, **given_)  # type: ignore[arg-type]  # fields by name


def held(run_id: int, count: int, node: str = "a", gpus: int = 1, age_s: float = 1e4) -> list[HeldEngine]:
    return [HeldEngine(f"r{run_id}-{n:02}-{node}", run_id, node, gpus, age_s) for n in range(count)]


# ---------------------------------------------------------------- values


def test_an_engine_s_saving_falls_with_each_one_and_adds_up_to_the_curve() -> None:
    one = Benefit(0.05, 8.0, 1, 60.0, curve=((0, 100.0), (1, 60.0), (2, 40.0), (4, 30.0)))
    found = savings(one, 8)
    assert found[:2] == pytest.approx([0.4, 1 / 3])
    assert found[2] > found[3]
    assert math.prod(1 - saving for saving in found[:4]) == pytest.approx(0.3)
    assert found == sorted(found, reverse=True), "beyond what was tried ever less"
    assert savings(one, 8, 2.0)[:8:2] == pytest.approx(found[:4]), "a share of two stretches it"


def test_engines_that_pay_only_together_are_each_worth_their_part() -> None:
    found = savings(Benefit(0.05, 8.0, 1, 60.0, curve=((0, 100.0), (1, 100.0), (2, 64.0))), 2)
    assert found == pytest.approx([0.2, 0.2])


def test_a_run_that_cannot_go_on_without_engines_values_them_most() -> None:
    assert savings(
        Benefit(0.05, 8.0, 1, 60.0, curve=((0, math.inf), (1, 50.0), (2, 40.0))), 3
    ) == pytest.approx([1.0, 0.2, 1 - math.exp(math.log(0.8) * 4 / 9)])


def test_a_run_on_trial_or_unknown_is_worth_what_an_engine_costs_and_ever_less() -> None:
    assert savings(Benefit(None, 8.0, 1, 60.0, curve=((0, 9.0), (1, 1.0))), 2) == []
    assert values_of(bid(1, 3, benefit=None), 2.0) == pytest.approx([2.0, 1.0, 2 / 3])


@given(st.lists(st.floats(1.0, 1e4), min_size=2, max_size=8), st.integers(1, 40))
def test_values_never_grow_whatever_was_measured(seconds: list[float], engines: int) -> None:
    points = tuple((2**n - 1, one) for n, one in enumerate(seconds))
    found = savings(Benefit(0.05, 8.0, 1, 60.0, curve=points), engines)
    assert len(found) == engines
    assert all(left >= right - 1e-9 for left, right in itertools.pairwise(found))
    assert all(0 <= saving <= 1 for saving in found)


def test_entitlements_are_by_owner_and_leave_to_others_what_is_not_wanted() -> None:
    bids = [bid(1, owner="a", share=7), bid(2, owner="b", share=3), bid(3, owner="b", share=3)]
    assert entitlements(bids, 20) == pytest.approx({1: 14, 2: 3, 3: 3})
    assert entitlements([bid(1, 4, owner="a", share=7), *bids[1:]], 20) == pytest.approx({1: 4, 2: 8, 3: 8})
    assert entitlements([bid(1, 1, gpus=8), bid(2, 1)], 100) == pytest.approx({1: 8, 2: 1})


# ---------------------------------------------------------------- one division


def test_idle_gpus_go_where_they_save_most_and_equal_runs_get_equal_parts() -> None:
    alike = divide([bid(1), bid(2)], [], Nodes({"a": 8, "b": 4}), RULES, 99)
    assert alike.engines == {1: 6, 2: 6}
    more = divide([bid(1), bid(2, benefit=benefit(20.0))], [], Nodes({"a": 8, "b": 4}), RULES, 99)
    assert more.engines[1] > 6
    assert more.engines[2] >= 1


def test_shares_weigh_the_values() -> None:
    found = divide([bid(1, share=7), bid(2, share=3)], [], Nodes({"a": 40}), RULES, 99)
    assert found.engines[1] + found.engines[2] == 40
    assert 27 <= found.engines[1] <= 29


def test_gpus_change_hands_when_another_run_gains_enough_more() -> None:
    poor, rich = bid(1, benefit=benefit(10.0)), bid(2, benefit=benefit(90.0, run_gpus=32.0))
    found = divide([poor, rich], held(1, 8), Nodes({"a": 0}), replace(RULES, floor=0.0), 99)
    assert found.engines == {1: 7, 2: 1}, "few at a time"
    assert len(found.leaving) == 1
    assert "run run2" in next(iter(found.leaving.values()))
    young = divide([poor, rich], held(1, 8, age_s=10.0), Nodes({"a": 0}), RULES, 99)
    assert young.engines == {1: 8, 2: 0}, "engines that have just started stay"
    slow = divide(
        [poor, replace(rich, benefit=benefit(90.0, 32.0, start_s=1799.0))],
        held(1, 8),
        Nodes({"a": 0}),
        replace(RULES, floor=0.0),
        99,
    )
    assert slow.engines == {1: 8, 2: 0}, "a start that takes all of the time pays for nothing"


def test_equal_runs_do_not_take_from_each_other() -> None:
    found = divide([bid(1), bid(2)], [*held(1, 4), *held(2, 4)], Nodes({"a": 0}), RULES, 99)
    assert (found.engines, found.leaving) == ({1: 4, 2: 4}, {})


#: Of four runs that are alike, as they predicted themselves in simulation after 570 s: one has finished its first step, the other has not.
FINISHED = (
    (0, 877.0), (1, 708.4), (2, 598.6), (3, 539.2), (4, 522.3), (6, 482.1), (8, 444.7), (12, 401.3), (16, 376.8)
)  # fmt: skip
UNFINISHED = (
    (0, 475.6), (1, 404.7), (2, 358.2), (3, 325.7), (4, 303.3), (6, 272.7), (8, 253.0), (12, 230.6), (16, 221.1)
)  # fmt: skip
#: And after 2,300 s: of one that had lost two engines, and kept 3 for the rest of the hour, and of one that had 5.
BEHIND = (
    (0, 908.0), (1, 732.5), (2, 624.6), (3, 562.7), (4, 545.1), (6, 505.1), (8, 469.4), (12, 439.9), (16, 416.9)
)  # fmt: skip
AHEAD = (
    (0, 903.6), (1, 730.3), (2, 614.4), (3, 565.5), (4, 547.2), (6, 498.2), (8, 464.5), (12, 428.2), (16, 405.3)
)  # fmt: skip


def predicted(run_id: int, points: tuple[tuple[int, float], ...]) -> Bid:
    """An 8B on 8 GPUs, with engines of two."""
    return bid(run_id, 34, 2, benefit=Benefit(0.003, 8.0, 2, 30.0, curve=points))


def test_what_equal_runs_predict_unlike_takes_no_engine_from_a_share() -> None:
    """Seen in simulation: a run went from 5 engines to 3, and each step with 3 took a sixth longer."""
    bids = [predicted(1, FINISHED), *(predicted(n, UNFINISHED) for n in (2, 3, 4))]
    engines = [
        one for run_id, count in ((1, 5), (2, 5), (3, 4), (4, 4)) for one in held(run_id, count, gpus=2)
    ]
    rules = DivisionRules()
    assert divide(bids, engines, Nodes({"a": 0}), replace(rules, doubt=1.0), 99).leaving, (
        "by the numbers alone"
    )
    found = divide(bids, engines, Nodes({"a": 0}), rules, 99)
    assert (found.leaving, found.engines) == ({}, {1: 5, 2: 5, 3: 4, 4: 4})


def test_a_run_behind_its_share_gets_an_engine_back_though_it_predicts_to_gain_no_more() -> None:
    bids = [*(predicted(n, AHEAD) for n in (1, 2, 4)), predicted(3, BEHIND)]
    engines = [
        one for run_id, count in ((1, 5), (2, 5), (4, 5), (3, 3)) for one in held(run_id, count, gpus=2)
    ]
    rules = DivisionRules()
    assert not divide(bids, engines, Nodes({"a": 0}), replace(rules, doubt=1.0), 99).leaving
    found = divide(bids, engines, Nodes({"a": 0}), rules, 99)
    assert found.engines == {1: 4, 2: 5, 4: 5, 3: 4}
    (reason,) = found.leaving.values()
    assert (
        "one of run run3 saves 0.144; this one of run run1 0.165 GPU-s a GPU-s, which counts 0.5 times"
        in reason
    )
    assert "run run1 keeps 4 engines, its share is 4.5; run run3 comes to 4, its share is 4.5" in reason


def noisy(draw: random.Random) -> tuple[tuple[int, float], ...]:
    """One truth, each size of which is predicted a few percent too long or too short."""
    return tuple((n, seconds * (1 + draw.gauss(0, 0.03))) for n, seconds in AHEAD)


def played_with_noise(seed: int, rules: DivisionRules) -> tuple[float, int]:
    """Two hours of four runs that are alike, one of which predicts anew every 150 s: the mean engines of the run with fewest, of 4 that are
    its share, and how many engines left for another run."""
    draw, played, moves = random.Random(seed), Played({"a": 8, "b": 8, "c": 8, "d": 8}, rules), 0
    bids, engines, polls = [predicted(n, noisy(draw)) for n in range(4)], Counter[int](), 240
    for poll in range(polls):
        if poll % 5 == 0:
            at = draw.randrange(4)
            bids[at] = predicted(at, noisy(draw))
        found = played.poll(bids, POLL_S)
        moves += len(found.leaving)
        engines.update(found.engines)
    return min(engines.values()) / polls, moves


def test_equal_runs_keep_their_shares_whatever_the_noise_of_their_forecasts() -> None:
    rules = DivisionRules()
    steady = [played_with_noise(seed, rules) for seed in range(5)]
    assert min(least for least, _ in steady) >= 0.95 * 4
    hasty = [played_with_noise(seed, replace(rules, doubt=1.0)) for seed in range(5)]
    assert min(least for least, _ in hasty) < 0.9 * 4, "by the numbers alone they do not"
    assert sum(moves for _, moves in steady) < sum(moves for _, moves in hasty) / 4


def test_a_floor_is_what_keeps_the_predicted_throughput_and_no_gpu_more() -> None:
    steep, flat = bid(1, benefit=benefit(60.0)), bid(2, benefit=benefit(1.0))
    assert floor_of(steep, 4, 0.9) == 3, "steps of 52 s with 4, 55 with 3, 60 with 2"
    assert floor_of(steep, 4, 1.0) == 4
    assert floor_of(steep, 4, 0.0) == 0
    assert floor_of(flat, 4, 0.9) == 0, "none of them shortens its step by a tenth"
    assert floor_of(bid(3, benefit=None), 4, 0.9) == 3, "nothing is known: that part of the engines"
    assert floor_of(bid(3, benefit=None), 1, 0.9) == 1, "one engine is no share of none"
    assert floor_of(bid(3, benefit=None), 1, 0.0) == 0
    assert floor_of(bid(4, gpus=8), 7, 0.9) == 0


def test_value_alone_does_not_go_below_a_floor_but_a_floor_is_filled() -> None:
    poor, rich = bid(1, benefit=benefit(60.0, 0.5)), bid(2, benefit=benefit(95.0, 64.0))
    found = divide([poor, rich], [*held(1, 3), *held(2, 5)], Nodes({"a": 0}), RULES, 99)
    assert found.engines == {1: 3, 2: 5}
    below = divide([poor, rich], [*held(1, 3), *held(2, 5)], Nodes({"a": 0}), replace(RULES, floor=0.0), 99)
    assert below.engines == {1: 2, 2: 6}
    short = divide([poor, rich], held(2, 8), Nodes({"a": 0}), RULES, 99)
    assert short.engines == {1: 3, 2: 5}


def test_shares_are_of_what_the_caps_let_there_be() -> None:
    """Seen on a private Slurm: 30 of 100 was a share of 12 GPUs, where ten engines may run and two GPUs more are idle."""
    math_, code = bid(1, share=7, benefit=None), bid(2, share=3, benefit=None)
    found = divide([math_, code], held(1, 10), Nodes({"a": 2}), DivisionRules(floor=1.0), 10)
    assert found.engines == {1: 7, 2: 3}


def test_a_large_engine_takes_the_node_where_the_least_is_lost() -> None:
    wants = bid(3, 1, gpus=4, benefit=benefit(95.0, 256.0, gpus=4))
    small = [*held(1, 4, "a"), *held(2, 4, "b")]
    found = divide(
        [bid(1), bid(2, benefit=benefit(5.0)), wants],
        small,
        Nodes({"a": 0, "b": 0}),
        replace(RULES, floor=0),
        99,
    )
    assert found.engines == {1: 4, 2: 0, 3: 1}
    assert set(found.leaving) == {one.intent_id for one in small if one.node == "b"}


def test_where_a_cap_binds_gpus_change_hands_though_others_are_idle() -> None:
    poor, rich = bid(1, benefit=benefit(10.0)), bid(2, benefit=benefit(90.0, run_gpus=32.0))
    found = divide([poor, rich], held(1, 4), Nodes({"a": 0, "b": 9}), replace(RULES, floor=0), 4)
    assert found.engines == {1: 3, 2: 1}
    lower = divide([poor, rich], [*held(1, 4), *held(2, 4)], Nodes({"a": 0}), replace(RULES, floor=0), 5)
    assert lower.engines == {1: 0, 2: 5}, "a cap that fell: who saves least gives up"


def test_a_run_that_waited_too_long_takes_an_engine_of_any_other() -> None:
    rich = bid(1, benefit=benefit(95.0, 64.0))
    found = divide(
        [rich, bid(2, waited_s=601.0, benefit=benefit(1.0, gpus=8), gpus=8)],
        held(1, 8),
        Nodes({"a": 0}),
        RULES,
        99,
    )
    assert found.engines == {1: 0, 2: 1}
    young = [*held(1, 4), *held(1, 4, "b", age_s=200.0), *held(1, 4, "c", age_s=10.0)]
    waits = bid(2, gpus=8, waited_s=601.0)
    found = divide([rich, waits], young, Nodes({"a": 0, "b": 4, "c": 4}), RULES, 99)
    assert found.kept == {"b": 2}, "the node that is soonest free is set aside"
    assert found.engines == {1: 16, 2: 0}, "others go on elsewhere"


def test_an_engine_that_has_not_registered_is_taken_for_no_other_run() -> None:
    """Neither for one that saves more nor for one that starves: its start would have been for nothing, and the next one's too."""
    hasty = replace(RULES, floor=0.0, hold_s=1.0)
    poor, rich = bid(1, benefit=benefit(10.0)), bid(2, benefit=benefit(90.0, run_gpus=32.0))
    starts = [replace(one, age_s=10.0, registers_s=110.0) for one in held(1, 8)]
    assert not divide([poor, rich], starts, Nodes({"a": 0}), hasty, 99).leaving
    assert not divide([poor, replace(rich, waited_s=601.0)], starts, Nodes({"a": 0}), hasty, 99).leaving
    there = [*starts[:7], replace(starts[7], registers_s=0.0)]
    assert set(divide([poor, rich], there, Nodes({"a": 0}), hasty, 99).leaving) == {there[7].intent_id}
    large = bid(2, gpus=8, waited_s=601.0)
    found = divide([poor, large], there, Nodes({"a": 0}), hasty, 99)
    assert found.kept == {"a": 2}, "its node is kept meanwhile, so that no other engine begins to start there"
    assert set(found.leaving) == {there[7].intent_id}


def test_a_node_is_set_aside_for_a_run_whose_owner_yields_for_it() -> None:
    bids = [bid(1, owner="a"), bid(2, owner="b"), bid(3, gpus=8, owner="b", waited_s=601.0)]
    engines = [*held(1, 8, "a", age_s=10.0), *held(1, 7, "b", age_s=200.0), *held(2, 1, "b")]
    assert divide(bids, engines, Nodes({"a": 0, "b": 0}), RULES, 99).kept == {"b": 3}
    young = [replace(one, age_s=10.0) for one in engines]
    assert divide(bids, young, Nodes({"a": 0, "b": 0}), RULES, 99).kept == {}, (
        "its owner has its share, and nothing to yield yet"
    )


@pytest.mark.parametrize("runs", [1, 3, 5])
def test_an_owner_s_many_runs_have_no_more_nodes_set_aside_than_its_share(runs: int) -> None:
    """One young engine on each node keeps it from being taken at once, and the older ones leave: by five runs that wait for a whole node
    each, the other owner would have kept 13 GPUs of 48."""
    there = [
        replace(one, intent_id=f"{one.intent_id}-{n}", age_s=1e4 if n else 10.0)
        for node in "abcdef"
        for n, one in enumerate(held(1, 8, node))
    ]
    waiting = [bid(10 + n, 1, gpus=8, owner="mallory", waited_s=700.0 - n) for n in range(runs)]
    found = divide([bid(1, owner="alice"), *waiting], there, Nodes(dict.fromkeys("abcdef", 0)), RULES, 99)
    share = {1: 1, 3: 3, 5: 3}[runs]  # nodes: half of the GPUs, or what it wants
    assert sorted(found.kept.values()) == [10, 11, 12][:share]
    assert len(found.leaving) == 7 * share
    assert found.engines[1] == 48 - 7 * share


# ---------------------------------------------------------------- many, one after the other


@dataclass
class Played:
    """Runs over a fleet, where engines leave and start at once. `most_wait_s`: the longest that a run wanted engines and had none.
    `registers_s`: what every other engine takes to register; the rest have at once."""

    nodes: Mapping[str, int]
    rules: DivisionRules
    now: float = 0.0
    engines: dict[str, tuple[int, str, int, float]] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    most_wait_s: float = 0.0
    number: int = 0
    most_engines: int = 10**6
    most_gpus: int | None = None
    registers_s: float = 0.0

    def _registers_s(self, name: str, age_s: float) -> float:
        return max(0.0, self.registers_s - age_s) if int(name[1:]) % 2 else 0.0

    def poll(self, bids: list[Bid], seconds: float) -> Division:
        wanted = {one.run_id for one in bids if one.engines}
        running = {run_id for run_id, *_ in self.engines.values()}
        self.since = {run_id: self.since.get(run_id, self.now) for run_id in wanted - running}
        waits = [self.now - at for at in self.since.values()]
        self.most_wait_s = max([self.most_wait_s, *waits])
        used = Counter[str]()
        for _, node, gpus, _ in self.engines.values():
            used[node] += gpus
        space = Nodes({name: gpus - used[name] for name, gpus in self.nodes.items()})
        known = [
            HeldEngine(
                name, run_id, node, gpus, self.now - at, registers_s=self._registers_s(name, self.now - at)
            )
            for name, (run_id, node, gpus, at) in self.engines.items()
        ]
        asked = [replace(one, waited_s=self.now - self.since.get(one.run_id, self.now)) for one in bids]
        idle = space.gpus
        found = divide(asked, known, space, self.rules, self.most_engines, self.most_gpus)
        self.decided(asked, known, idle, found)
        for name in found.leaving:
            del self.engines[name]
        for run_id in {one.run_id for one in bids}:
            its = sorted(name for name, one in self.engines.items() if one[0] == run_id)
            for name in its[found.engines[run_id] :]:
                del self.engines[name]
        self._start(asked, found)
        self.now += seconds
        return found

    def decided(self, bids: list[Bid], known: list[HeldEngine], idle: int, found: Division) -> None:
        """A division was made of these; before anything comes of it."""

    def _start(self, bids: list[Bid], found: Division) -> None:
        by_run = {one.run_id: one for one in bids}
        have = Counter(run_id for run_id, *_ in self.engines.values())
        for run_id in found.turns:
            if have[run_id] >= found.engines[run_id]:
                continue
            used = Counter[str]()
            for _, node, gpus, _ in self.engines.values():
                used[node] += gpus
            gpus = by_run[run_id].gpus
            open_ = [name for name in sorted(self.nodes) if found.kept.get(name, run_id) == run_id]
            fits = [name for name in open_ if self.nodes[name] - used[name] >= gpus]
            if fits:
                self.number += 1
                self.engines[f"e{self.number:06}"] = (run_id, fits[0], gpus, self.now)
                have[run_id] += 1


POLL_S = 30.0


@pytest.mark.parametrize("seed", range(40))
def test_no_run_starves_whatever_the_others_save(seed: int) -> None:
    """Engines of 1, 2 and 8 GPUs, values that differ a thousandfold, demands that change: the bound that `divide` states."""
    draw = random.Random(seed)
    nodes, count = draw.randint(1, 4), draw.randint(2, 8)
    played = Played({f"n{n}": 8 for n in range(nodes)}, RULES)
    runs = [
        bid(run_id, 20, gpus, share=draw.randint(1, 5), benefit=benefit(work, run_gpus, gpus))
        for run_id in range(count)
        for gpus, work, run_gpus in [
            (draw.choice([1, 2, 8]), draw.uniform(0.0, 99.0), draw.choice([1.0, 8.0, 64.0]))
        ]
    ]
    for _ in range(120):
        if draw.random() < 0.2:
            run_id = draw.randrange(count)
            runs[run_id] = replace(runs[run_id], engines=draw.choice([0, 1, 4, 20]))
        played.poll(runs, POLL_S)
        used = Counter[str]()
        for _, node, gpus, _ in played.engines.values():
            used[node] += gpus
        assert all(used[name] <= 8 for name in used)
    rounds = math.ceil(count / nodes)  # a node has room for one engine of any size
    assert played.most_wait_s <= RULES.wait_s + rounds * (RULES.hold_s + 2 * POLL_S)


@pytest.mark.parametrize("seed", range(20))
def test_no_run_starves_beside_others_of_its_owner(seed: int) -> None:
    """The same with two owners: within an owner's share there is room for one engine at least."""
    draw = random.Random(seed)
    nodes, count = draw.randint(1, 3), draw.randint(3, 8)
    played = Played({f"n{n}": 8 for n in range(nodes)}, RULES)
    runs = [
        bid(run_id, 20, gpus, owner=draw.choice("ab"), benefit=benefit(draw.uniform(0.0, 99.0), 8.0, gpus))
        for run_id in range(count)
        for gpus in [draw.choice([1, 2, 8])]
    ]
    for _ in range(150):
        played.poll(runs, POLL_S)
    assert played.most_wait_s <= RULES.wait_s + count * (RULES.hold_s + 2 * POLL_S)


def test_an_owner_gains_nothing_by_more_runs() -> None:
    """An attack: each of 20 runs waits until it may take an engine of anybody, and the neighbour has none left."""
    played = Played({"n0": 10}, RULES)
    one = [bid(0, 10, owner="victim", share=7, benefit=None)]
    many = [bid(1 + n, 10, owner="attacker", share=3, benefit=None) for n in range(20)]
    played.poll(one, POLL_S)
    fewest = 10
    for _ in range(300):
        played.poll([*one, *many], POLL_S)
        held_ = Counter(run_id for run_id, *_ in played.engines.values())
        fewest = min(fewest, held_[0])
    assert fewest >= 7
    assert played.most_wait_s <= RULES.wait_s + math.ceil(20 / 3) * (RULES.hold_s + 2 * POLL_S)


@pytest.mark.parametrize("rule", ["wait_s", "hold_s"])
def test_without_its_rules_the_bound_does_not_hold(rule: str) -> None:
    """What the schedules above can see: a run of large engines beside small ones that are worth more."""
    rules = replace(RULES, **{rule: math.inf})
    runs = [bid(0, 20, 8, benefit=benefit(1.0, 1.0, 8)), bid(1, 20, benefit=benefit(90.0, 64.0))]
    for known, starves in ((rules, True), (RULES, False)):
        played = Played({"n0": 8}, known)
        played.poll(runs[1:], POLL_S)
        for _ in range(120):
            played.poll(runs, POLL_S)
        assert (played.most_wait_s > RULES.wait_s + 2 * (RULES.hold_s + 2 * POLL_S)) is starves


@pytest.mark.parametrize("gpus", [1, 8])
def test_an_owner_who_closes_each_run_that_got_an_engine_and_opens_another_takes_no_more_than_its_share(
    gpus: int,
) -> None:
    played, alices, run_id = Played(dict.fromkeys("ab", 8), RULES), list[int](), 100
    while played.now < 3600:
        if gone := [name for name, one in played.engines.items() if one[0] == run_id]:
            run_id += 1
        for name in gone:
            del played.engines[name]
        played.poll([bid(1, owner="alice"), bid(run_id, 16 // gpus, gpus=gpus, owner="mallory")], POLL_S)
        alices.append(sum(1 for run, *_ in played.engines.values() if run == 1))
    assert run_id > 130, "it got one again and again"
    assert min(alices[1:]) >= 8 - 1  # its share, and its floor of that


def test_equal_facts_in_another_order_divide_alike() -> None:
    bids = [bid(1), bid(2, share=3), bid(3, gpus=2)]
    engines = [*held(1, 6, "a"), *held(2, 2, "b"), *held(3, 1, "b", gpus=2)]
    first = divide(bids, engines, Nodes({"a": 2, "b": 4}), RULES, 99)
    assert divide(bids[::-1], engines[::-1], Nodes({"b": 4, "a": 2}), RULES, 99) == first


# ---------------------------------------------------------------- in the harvester's decision


def limits(**more: object) -> HarvestLimits:
    return replace(LIMITS, caps=Caps(64, 64), division=replace(RULES, floor=0.0), **more)  # type: ignore[arg-type]  # by name


def demand(
    run_id: int, engines: int = 12, gpus: int = 1, work: float = 80.0, run_gpus: float = 8.0
) -> Demand:
    known = benefit(work, run_gpus, gpus)
    return Demand(run_id, f"run{run_id}", engines, gpus, "useful", benefit=known, owner=f"owner{run_id}")


def submitted(decision: HarvestDecision) -> dict[int, int]:
    return Counter(action.run_id for action in decision.actions if isinstance(action, Submit))


def test_the_harvester_starts_what_the_division_gives_and_says_by_which_numbers() -> None:
    decision = decide(view(NOW), [demand(1), demand(2)], [], limits(), NOW)
    assert submitted(decision) == {1: 6, 2: 6}
    assert decision.division is not None
    rows = {row["run"]: row for row in decision.division.rows}
    assert (rows["run1"]["gets"], rows["run1"]["wants"]) == (6, 12)
    assert rows["run1"]["next"] < rows["run1"]["last"]  # type: ignore[operator]  # JSON
    assert "run run2 gets 6 of 12 engines" in decision.division.reason


def ours(run_id: int, count: int, first: int = 1, **more: object) -> list[OurJob]:
    found = []
    for n in range(count):
        number = first + n
        fields = {"node": f"node{1 + (number - 1) // 4}", "started_at": NOW - 1e4, **more}
        found.append(replace(engine(number, owner=f"owner{run_id}"), run_id=run_id, **fields))  # type: ignore[arg-type]  # by name
    return found


def test_an_engine_leaves_for_a_run_that_gains_more_and_its_gpu_is_counted_while_it_leaves() -> None:
    jobs = ours(1, 12)
    asked = [demand(1, work=5.0), demand(2, work=90.0, run_gpus=32.0)]
    decision = decide(view(NOW, [listed(one) for one in jobs]), asked, jobs, limits(), NOW)
    left = [action for action in decision.actions if isinstance(action, DrainAllocated)]
    assert [action.code for action in left] == [HarvestCode.DIVISION]
    assert "one of run run2 saves" in left[0].reason
    assert not submitted(decision), "its GPU is not free yet"
    going = [
        replace(one, drain_kind=DrainKind.DRAINING, asked_at=NOW, why_draining=HarvestCode.DIVISION)
        if one.intent_id == left[0].intent_id
        else one
        for one in jobs
    ]
    again = decide(view(NOW, [listed(one) for one in going]), asked, going, limits(), NOW)
    assert again.division is not None
    assert again.division.engines[2] == 2, "the one that comes free, and one more that leaves"
    gone = [one for one in jobs if one.intent_id != left[0].intent_id]
    then = decide(view(NOW, [listed(one) for one in gone]), asked, gone, limits(), NOW)
    assert submitted(then) == {2: 1}


@pytest.mark.parametrize("late_s", [-1.0, 0.0])
def test_an_engine_is_not_ended_for_another_run_before_it_registered_or_is_too_late(late_s: float) -> None:
    """`division_hold_s` is shorter than a start: each would end for the other run's, and no run would ever have one."""
    jobs = ours(1, 12, connected=False, started_at=NOW - REGISTERS_S - late_s)
    asked = [demand(1, work=5.0), demand(2, work=90.0, run_gpus=32.0)]
    hasty = limits(waiting_since=((2, NOW - 601.0),))
    hasty = replace(hasty, division=replace(RULES, floor=0.0, hold_s=1.0))
    decision = decide(view(NOW, [listed(one) for one in jobs]), asked, jobs, hasty, NOW)
    ended = [action.code for action in decision.actions if isinstance(action, Cancel)]
    assert ended == ([HarvestCode.DIVISION] * 2 if late_s >= 0 else []), "for its wait, and for what it saves"


def test_what_leaves_for_another_user_is_counted_for_no_run() -> None:
    jobs = ours(
        1, 12, drain_kind=DrainKind.DRAINING, asked_at=NOW, why_draining=HarvestCode.VOLUNTARY_PREEMPTION
    )
    decision = decide(view(NOW, [listed(one) for one in jobs]), [demand(2)], jobs, limits(), NOW)
    assert decision.division is not None
    assert decision.division.engines == {2: 0}
    assert decision.code is HarvestCode.NO_CAPACITY


def test_owners_get_their_gpus_only_where_they_may_start() -> None:
    rule = OwnerRule("owner1", 1, None, frozenset({"none"}))
    decision = decide(view(NOW), [demand(1), demand(2)], [], limits(owners=(rule,)), NOW)
    assert submitted(decision) == {2: 12}


def test_a_node_that_is_kept_for_a_starved_run_gets_nobody_else_s_engine() -> None:
    jobs = [*ours(1, 1), *ours(1, 8, 5, started_at=NOW)]
    asked = [demand(1, 12), demand(2, 1, gpus=4)]
    waits = limits(waiting_since=((2, NOW - 601.0),))
    decision = decide(view(NOW, [listed(one) for one in jobs]), asked, jobs, waits, NOW)
    assert [action.intent_id for action in decision.actions if isinstance(action, DrainAllocated)] == [
        jobs[0].intent_id
    ], "node1 is to be whole"
    assert not submitted(decision)
