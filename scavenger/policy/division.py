"""How GPUs are divided among runs: by what one more engine saves each of them. Pure.

    Demand.benefit --values_of--> what each engine of a run saves, a GPU
    shares, capacity --entitlements--> the floor of each run
    claims: who waited too long, then who is below its floor, then who saves most
      on idle GPUs, or ones that come free --grants-->  engines
      on GPUs of a run that saves less     --moves-->   an engine leaves, another one starts

A value is in GPU-seconds of the run's own that a harvested GPU saves in a second: saving * run_gpus / gpus, what `fleet_size.worth` weighs
a start by. Summed over engines this is run_gpus * log(T(0) / T(n)), T(n) the step time with n engines: giving the next GPU to the largest
value maximises the sum, as each term is concave (`savings`). A run that has many needs ever better reasons for more (proportional
fairness, Kelly, Maulloo and Tan 1998). A share of w stretches the curve: the n-th engine counts as the n/w-th. So of runs that are alike
one with twice the share gets twice the engines, whatever the curve.

Each run predicts its own curve, and what one engine saves is a small difference of two predicted step times: it is known within a factor
(`DivisionRules.doubt`). So shares are what stands, and a difference within that factor moves nothing away from them: it moves engines back.

Owns the claims, their order, and what a move must gain. Knows nothing of jobs, limits of a site and nodes but by `Space`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from scavenger.policy.fleet_size import Benefit

Key = TypeVar("Key", int, str)
#: What nothing is known of is worth as much: a GPU that saves as much as one of the run's own, and ever less of more engines.
UNKNOWN = 1.0
#: Of the engines that run, this part at most changes hands in one decision for value alone, one at least.
MOST_MOVED = 0.125


@dataclass(frozen=True, slots=True)
class DivisionRules:
    """`floor`: a run keeps as many engines as give it this part of the throughput that it would have with its share of the GPUs, whatever
    others save. `wait_s`: a run that wants engines and has had none for so long goes first. `hold_s`: an engine stays for so long after
    its start, whoever goes first, and until it has registered: taken before that, its start was for nothing. `horizon_s`: a move must have
    paid for the new engine's start by then, `margin` times over. `doubt`: a predicted saving may be so many times too small or too large: a
    move away from shares must gain as much more, and one towards them may seem to lose as much."""

    floor: float = 0.95
    wait_s: float = 900.0
    hold_s: float = 300.0
    horizon_s: float = 1800.0
    margin: float = 1.25
    doubt: float = 2.0

    def stays_s(self, one: HeldEngine) -> float:
        """For how long yet an engine is taken for no other run."""
        return max(self.hold_s - one.age_s, one.registers_s)

    def __post_init__(self) -> None:
        if (
            not 0 <= self.floor <= 1
            or min(self.wait_s, self.hold_s, self.horizon_s) < 0
            or min(self.margin, self.doubt) < 1
        ):
            raise ValueError(f"{self}: 0 <= floor <= 1, no time below 0, margin and doubt >= 1")


@dataclass(frozen=True, slots=True)
class Bid:
    """What a run asks for: `engines` of `gpus` GPUs on each of `n_nodes` nodes. `share`: its owner's. `waited_s`: for how long it has
    wanted engines and none of its own has run."""

    run_id: int
    run: str
    engines: int
    gpus: int
    owner: str = ""
    share: int = 1
    benefit: Benefit | None = None
    n_nodes: int = 1
    waited_s: float = 0.0

    @property
    def all_gpus(self) -> int:
        """Of one engine, on all of its nodes."""
        return self.gpus * self.n_nodes


@dataclass(frozen=True, slots=True)
class HeldEngine:
    """An engine that runs, or a job that waits (`node` ""). `age_s`: since it started. `fixed`: it is not moved (it waits, changes
    hands, or has several nodes). `registers_s`: it has not registered yet, and has so much time left to; 0: it has, or is too late."""

    intent_id: str
    run_id: int
    node: str
    gpus: int
    age_s: float = 0.0
    fixed: bool = False
    registers_s: float = 0.0


class Space(Protocol):
    """Idle GPUs, and those that come free: where one more engine of a run may start."""

    def take(self, bid: Bid, nodes: frozenset[str] | None = None) -> tuple[str, ...] | None:
        """Set one engine's GPUs aside on one of `nodes` (None: any that its owner may use). None where none has room."""

    def give_up(self, node: str, gpus: int) -> None:
        """An engine of ours leaves the node (`gpus` below 0: it stays after all)."""

    def idle(self, node: str) -> int:
        """GPUs of a node that `take` may take."""

    def open(self, bid: Bid) -> frozenset[str]:
        """Nodes on which engines of this run may start."""

    def close(self, node: str) -> None:
        """Nobody else takes anything of it."""

    @property
    def gpus(self) -> int:
        """That `take` may take, on all nodes."""


@dataclass(frozen=True, slots=True)
class Division:
    """`engines`: by run, what it may have. `leaving`: engines that leave for another run's, and why. `turns`: runs in the order in which
    they were given engines to start. `kept`: nodes that are set aside for one run. `rows`: the numbers, by run; `reason`: in words."""

    engines: Mapping[int, int]
    leaving: Mapping[str, str]
    turns: tuple[int, ...]
    kept: Mapping[str, int]
    rows: tuple[Mapping[str, float | str], ...]
    reason: str


def savings(benefit: Benefit | None, engines: int, weight: float = 1.0) -> list[float]:
    """The share of a step that each engine saves, the first one first; never more than the one before. Empty: nothing is known.

    `weight`: how far the run's curve is stretched.

    By the curve of step times, whose logarithm is interpolated over log(1 + n) and of which the upper concave hull is taken: where only
    several engines together pay, each has its part.
    """
    if benefit is None or benefit.saving is None:
        return []
    points = [(n, -math.log(seconds)) for n, seconds in sorted(benefit.curve) if 0 < seconds < math.inf]
    if len(points) < 2:
        return [max(0.0, benefit.saving)] * engines
    slopes = [math.inf] * points[0][0]  # without these there is no step at all
    hull: list[tuple[int, float]] = []
    for point in _each(points):
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    for left, right in itertools.pairwise(hull):
        slopes += [max(0.0, _slope(left, right))] * (right[0] - left[0])
    return [1 - math.exp(-_at(slopes, (n + 0.5) / weight)) for n in range(engines)]


def _at(slopes: Sequence[float], position: float) -> float:
    """What is beyond the last falls with the square, as where samples are divided among ever more engines."""
    if position < len(slopes):
        return slopes[int(position)]
    return slopes[-1] * (len(slopes) / (position + 0.5)) ** 2


def _each(points: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """The points, and those at every number of engines between them."""
    for left, right in itertools.pairwise(points):
        span = math.log1p(right[0]) - math.log1p(left[0])
        for n in range(left[0], right[0]):
            yield n, left[1] + (right[1] - left[1]) * (math.log1p(n) - math.log1p(left[0])) / span
    yield points[-1]


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def values_of(bid: Bid, weight: float = 1.0) -> list[float]:
    """What each of a run's engines saves, a GPU and second; never more than the one before. `weight`: as `weights` has it."""
    known = savings(bid.benefit, bid.engines, weight)
    if bid.benefit is None or not known:
        return [UNKNOWN * weight / (n + 1) for n in range(bid.engines)]
    return [saving * bid.benefit.run_gpus / bid.all_gpus for saving in known]


def weights(bids: Sequence[Bid]) -> dict[int, float]:
    """By run: its owner's share, divided among the owner's runs; 1 on average."""
    asking = [bid for bid in bids if bid.engines > 0]
    runs = Counter(bid.owner for bid in asking)
    found = {bid.run_id: bid.share / runs[bid.owner] for bid in asking}
    mean = sum(found.values()) / max(1, len(found))
    return {run_id: share / mean for run_id, share in found.items()}


def entitlements(bids: Sequence[Bid], gpus: float) -> dict[int, float]:
    """Each run's share of so many GPUs: by the shares of owners, equally among an owner's runs; what one does not want is the others'."""
    runs_of: dict[str, list[Bid]] = {}
    for bid in sorted(bids, key=lambda bid: bid.run_id):
        runs_of.setdefault(bid.owner, []).append(bid)
    shares = {owner: float(runs[0].share) for owner, runs in runs_of.items()}
    wants = {owner: sum(bid.engines * bid.all_gpus for bid in runs) for owner, runs in runs_of.items()}
    by_owner = _filled(wants, shares, gpus)
    found: dict[int, float] = {}
    for owner, runs in runs_of.items():
        its = {bid.run_id: bid.engines * bid.all_gpus for bid in runs}
        found |= _filled(its, dict.fromkeys(its, 1.0), by_owner[owner])
    return found


def floor_of(bid: Bid, gpus: float, floor: float) -> int:
    """The fewest engines with which a run is at least `floor` times as fast as with all that so many GPUs are; of one of which nothing is
    known, this part of them rounded down, and one at least.

    Rounded up, a run of large engines keeps what it had before anything was known: the others fared worse by it (docs/fleet.md)."""
    engines = min(bid.engines, int(gpus / bid.all_gpus + 1e-6))
    known = savings(bid.benefit, engines)
    if not known:
        return max(int(floor * engines + 1e-6), min(engines, math.ceil(floor)))
    left = 1.0
    while engines and left * (1 - known[engines - 1]) >= floor:
        left *= 1 - known[engines - 1]
        engines -= 1
    return engines


def _filled(wants: Mapping[Key, float], weights: Mapping[Key, float], total: float) -> dict[Key, float]:
    """`total` by weight, nobody more than it wants."""
    given, left, open_ = dict.fromkeys(wants, 0.0), total, {key for key, want in wants.items() if want > 0}
    while open_ and left > 1e-6:
        level = min((wants[key] - given[key]) / weights[key] for key in open_)
        level = min(level, left / sum(weights[key] for key in open_))
        for key in open_:
            given[key] += level * weights[key]
        left -= level * sum(weights[key] for key in open_)
        open_ = {key for key in open_ if wants[key] - given[key] > 1e-6}
    return given


def divide(
    bids: Sequence[Bid],
    held: Sequence[HeldEngine],
    space: Space,
    rules: DivisionRules,
    most_engines: int,
    most_gpus: int | None = None,
) -> Division:
    """How many engines each run may have now, and which of those that run leave for others. Equal facts in another order divide alike.

    No run starves: one that wants an engine and has none goes first after `rules.wait_s`, the one that has waited longest before others,
    and takes GPUs of any engine that has run for `rules.hold_s` and has registered. Where these free no whole node for it, one is set aside
    until they do. So of k such runs each has an engine `wait_s + ceil(k / n) * hold_s` after it came to want one, n the engines of their
    size for which there are GPUs, and in place of `hold_s` what an engine may take to register where that is longer. (A run whose engines
    take several nodes is given idle GPUs only.)

    An owner gains nothing by more runs: beyond its share a starved run takes its turn on engines of the owner's other runs, so n is
    counted within that share, and is 1 at least.
    """
    deal = _Deal(bids, held, space, rules, most_engines, most_gpus)
    deal.trim()
    deal.rescue()
    deal.grant()
    deal.take_turns()
    deal.move()
    return deal.result()


@dataclass(slots=True)
class _Run:
    """One run while it is dealt to. `target`: engines that it is to have; `floor`: of these, what only a starved run may take; `share`: how
    many engines its share of the GPUs are."""

    bid: Bid
    values: list[float]
    target: int
    running: int
    floor: int
    has: int
    weight: float
    share: float
    granted: int = 0

    @property
    def next(self) -> float:
        """What one more engine saves."""
        return self.values[self.target] if self.target < self.bid.engines else 0.0

    @property
    def last(self) -> float:
        return self.values[self.target - 1] if self.target > 0 else 0.0

    @property
    def more(self) -> bool:
        return self.target < self.bid.engines

    @property
    def grows_within_share(self) -> bool:
        return self.target + 1 <= self.share + 1e-6


_STARVED, _BELOW_FLOOR, _BY_VALUE = range(3)


@dataclass(slots=True)
class _Deal:
    bids: Sequence[Bid]
    held: Sequence[HeldEngine]
    space: Space
    rules: DivisionRules
    most_engines: int
    most_gpus: int | None
    runs: dict[int, _Run] = field(init=False)
    share_of: dict[str, float] = field(init=False)  # GPUs that each owner is entitled to
    leaving: dict[str, str] = field(default_factory=dict)
    turns: list[int] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    set_aside: dict[int, int] = field(default_factory=dict)  # GPUs, of runs for which a node is being emptied
    moves: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = sorted(self.held, key=lambda one: one.intent_id)
        count, running = Counter(one.run_id for one in held), Counter(one.run_id for one in held if one.node)
        gpus = float(sum(one.gpus for one in held if one.node) + self.space.gpus)
        entitled = entitlements(self.bids, min(gpus, self._cap_in_gpus))
        self.held, weight = held, weights(self.bids)
        self.share_of = dict.fromkeys((bid.owner for bid in self.bids), 0.0)
        for bid in self.bids:
            self.share_of[bid.owner] += entitled[bid.run_id]
        self.runs = {
            bid.run_id: _Run(
                bid,
                values_of(bid, weight[bid.run_id]),
                min(bid.engines, count[bid.run_id]),
                running[bid.run_id],
                floor_of(bid, entitled[bid.run_id], self.rules.floor),
                count[bid.run_id],
                weight[bid.run_id],
                entitled[bid.run_id] / bid.all_gpus,
            )
            for bid in sorted(self.bids, key=lambda bid: bid.run_id)
            if bid.engines > 0
        }

    # ---------------------------------------------------------------- caps

    @property
    def _cap_in_gpus(self) -> float:
        """GPUs that no division can exceed. Of engines of several sizes `most_engines` may be the largest ones."""
        largest = max((bid.all_gpus for bid in self.bids if bid.engines > 0), default=0)
        return min(self.most_engines * largest, math.inf if self.most_gpus is None else self.most_gpus)

    @property
    def _engines(self) -> int:
        return sum(run.target for run in self.runs.values())

    @property
    def _gpus(self) -> int:
        return sum(run.target * run.bid.all_gpus for run in self.runs.values())

    def _within_caps(self, engines: int, gpus: int) -> bool:
        """With so many more."""
        return self._engines + engines <= self.most_engines and (
            self.most_gpus is None or self._gpus + gpus <= self.most_gpus
        )

    def trim(self) -> None:
        """A cap fell: whoever saves least gives up first, what is above a floor before the rest."""
        while not self._within_caps(0, 0):
            givers = [run for run in self.runs.values() if run.target]
            least = min(givers, key=lambda run: (run.target <= run.floor, run.last, -run.bid.run_id))
            least.target -= 1

    def _beyond_share(self, taker: _Run, given_up: int = 0) -> bool:
        """Whether the owner of `taker`, which starves, would have more than its share with an engine of it, once its other runs gave up
        so many GPUs. One engine is no owner's too many; a node that is kept for a run counts as the engine that comes there."""
        others = sum(
            run.target * run.bid.all_gpus + self.set_aside.get(run.bid.run_id, 0)
            for run in self.runs.values()
            if run.bid.owner == taker.bid.owner and run is not taker
        )
        left = others - given_up
        return left > 0 and left + taker.bid.all_gpus > self.share_of[taker.bid.owner] + 1e-6

    # ---------------------------------------------------------------- claims

    def _starves(self, run: _Run) -> bool:
        return not run.running and not run.granted and run.bid.waited_s >= self.rules.wait_s

    def _claim(self, run: _Run) -> tuple[int, float, float, int]:
        """Sorts whose turn is next."""
        bid = run.bid
        if self._starves(run) and not self._beyond_share(run):
            return _STARVED, -bid.waited_s, 0.0, bid.run_id
        if run.target < run.floor:
            return _BELOW_FLOOR, run.target / run.floor, -run.next, bid.run_id
        most = run.next * (self.rules.doubt if run.grows_within_share else 1.0)
        return _BY_VALUE, -most, run.target / run.weight, bid.run_id

    def _claims(self, blocked: set[int]) -> list[_Run]:
        """Runs that want one more engine, or have only jobs that wait, and have waited for too long."""
        asking = [run for run in self.runs.values() if run.bid.run_id not in blocked]
        asking = [run for run in asking if run.more or self._claim(run)[0] == _STARVED]
        return sorted(asking, key=self._claim)

    def _give(self, run: _Run, nodes: tuple[str, ...]) -> None:
        if self._claim(run)[0] == _STARVED:  # no other run's start takes a part of it before
            self.kept.update(dict.fromkeys(nodes, run.bid.run_id))
        run.target += run.more
        run.granted += 1
        self.turns.append(run.bid.run_id)

    def rescue(self) -> None:
        """Who has waited for too long comes before everybody."""
        blocked: set[int] = set()
        while (claims := self._claims(blocked)) and self._claim(claims[0])[0] == _STARVED:
            run = claims[0]
            if self._grant(run):
                continue
            blocked.add(run.bid.run_id)
            if run.bid.n_nodes > 1:
                continue
            if (losers := self._losers(run, _STARVED)) is not None:
                self._leave(losers, run, _STARVED)
            else:
                self._set_aside(run)

    def take_turns(self) -> None:
        """Who has waited for too long, while its owner has its share: in place of the owner's other runs."""
        waiting = [run for run in self.runs.values() if run.bid.n_nodes == 1 and self._starves(run)]
        kept_for = set[str]()
        for run in sorted(waiting, key=lambda run: (-run.bid.waited_s, run.bid.run_id)):
            if not self._beyond_share(run):
                continue  # `rescue` found nothing for it
            if (losers := self._losers(run, _STARVED)) is not None:
                self._leave(losers, run, _STARVED)
            elif run.bid.owner not in kept_for and not self._beyond_share(run, self._yielding(run)):
                kept_for.add(run.bid.owner)
                self._set_aside(run)

    def _yielding(self, taker: _Run) -> int:
        """GPUs that the other runs of its owner could give up for it now."""
        movable = self._movable(taker, _STARVED)
        return sum(one.gpus for _, _, one in movable if self._same_owner(taker, one))

    def _same_owner(self, taker: _Run, one: HeldEngine) -> bool:
        return self.runs[one.run_id].bid.owner == taker.bid.owner

    def _grant(self, run: _Run) -> bool:
        """An engine on GPUs that no other has."""
        fits = self._within_caps(run.more, run.more * run.bid.all_gpus)
        nodes = self.space.take(run.bid) if fits else None
        if nodes is not None:
            self._give(run, nodes)
        return nodes is not None

    def grant(self) -> None:
        """Idle GPUs, and those that come free, to one claim after the other."""
        blocked: set[int] = set()
        while claims := self._claims(blocked):
            if not self._grant(claims[0]):
                blocked.add(claims[0].bid.run_id)

    # ---------------------------------------------------------------- moves

    def move(self) -> None:
        """GPUs of engines that run, where a claim is good enough for them."""
        blocked: set[int] = set()
        left = max(1, int(MOST_MOVED * sum(1 for one in self.held if one.node)))
        while claims := self._claims(blocked):
            run = claims[0]
            rank = self._claim(run)[0]
            spent = rank == _STARVED or run.bid.n_nodes > 1 or (rank == _BY_VALUE and left <= 0)
            found = None if spent else self._losers(run, rank)
            if found is None:
                blocked.add(run.bid.run_id)
                continue
            left -= rank == _BY_VALUE
            self._leave(found, run, rank)

    def _movable(self, taker: _Run, rank: int) -> list[tuple[bool, float, HeldEngine]]:
        """Engines that may leave for `taker`: what their runs lose (for value: that a gain is weighed against), the least first, and
        whether that is below a floor."""
        found: list[tuple[bool, float, HeldEngine]] = []
        for run in self.runs.values():
            its = [
                one
                for one in self.held
                if one.run_id == run.bid.run_id and one.intent_id not in self.leaving and not one.fixed
            ]
            its = [one for one in its if one.node and self.rules.stays_s(one) <= 0]
            if run is taker or run.granted or not its:
                continue
            # Of jobs that wait none is given up: it holds no GPU.
            spare = run.target if rank == _STARVED else run.target - run.floor
            for nth, one in enumerate(sorted(its, key=lambda one: (-one.age_s, one.intent_id))):
                if nth < spare:
                    last = run.target - 1 - nth
                    times = self._times(taker, run, last) if rank == _BY_VALUE else 1.0
                    found.append((last < run.floor, run.values[last] * times, one))
        own_first = rank == _STARVED and self._beyond_share(taker)
        return sorted(
            found,
            key=lambda item: (
                own_first and not self._same_owner(taker, item[2]),
                item[0],
                item[1],
                item[2].intent_id,
            ),
        )

    def _times(self, taker: _Run, giver: _Run, left: int) -> float:
        """What an engine saves `giver`, which keeps `left`, counts so many times: less than once where the two come closer to their shares,
        more than once where they part from them, or only change places."""
        closer = (taker.target + 1) * giver.share + 1e-6 < (left + 1) * taker.share
        return 1 / self.rules.doubt if closer else self.rules.doubt

    def _losers(self, taker: _Run, rank: int) -> list[HeldEngine] | None:
        """The engines that leave so that one of `taker` can start where it then has GPUs; None where none should."""
        movable = self._movable(taker, rank)
        value = {one.intent_id: value for _, value, one in movable}
        below = {one.intent_id for floor, _, one in movable if floor}
        best: tuple[bool, float, str, list[HeldEngine]] | None = None
        for node in sorted(self.space.open(taker.bid)):
            missing, chosen = taker.bid.gpus - self.space.idle(node), list[HeldEngine]()
            for _, _, one in movable:
                if missing > 0 and one.node == node:
                    chosen.append(one)
                    missing -= one.gpus
            if missing > 0 or not self._caps_allow(taker, rank, chosen, movable):
                continue
            lost = sum(value[one.intent_id] * one.gpus for one in chosen)
            key = (any(one.intent_id in below for one in chosen), lost, node, chosen)
            if chosen and (best is None or key[:3] < best[:3]):
                best = key
        if best is None or (rank == _BY_VALUE and not self._pays(taker, best[1])):
            return None
        return best[3]

    def _caps_allow(
        self,
        taker: _Run,
        rank: int,
        chosen: list[HeldEngine],
        movable: Sequence[tuple[bool, float, HeldEngine]],
    ) -> bool:
        """Whether the caps do, and the share of the owner where `taker` starves; more engines join `chosen` until they do."""
        more = (one for _, _, one in movable if one not in chosen)
        while not self._within_caps(
            taker.more - len(chosen), taker.more * taker.bid.gpus - sum(one.gpus for one in chosen)
        ) or (
            rank == _STARVED
            and self._beyond_share(taker, sum(one.gpus for one in chosen if self._same_owner(taker, one)))
        ):
            one = next(more, None)
            if one is None:
                return False
            chosen.append(one)
        return True

    def _pays(self, taker: _Run, lost: float) -> bool:
        """While the new engine starts nobody gains."""
        serves = max(0.0, self.rules.horizon_s - self._start_s(taker))
        return taker.next * taker.bid.gpus * serves > self.rules.margin * lost * self.rules.horizon_s

    def _start_s(self, run: _Run) -> float:
        return run.bid.benefit.start_s if run.bid.benefit is not None else 0.0

    def _leave(self, losers: Sequence[HeldEngine], taker: _Run, rank: int) -> None:
        words, given = [], list[tuple[HeldEngine, float, float]]()
        for one in losers:
            giver = self.runs[one.run_id]
            given.append((one, giver.last, self._times(taker, giver, giver.target - 1)))
            giver.target -= 1
            self.space.give_up(one.node, one.gpus)
        nodes = self.space.take(taker.bid, frozenset(one.node for one in losers)) or self.space.take(
            taker.bid
        )
        if nodes is None:  # CPUs, memory or headroom stand against it: they stay
            for one in losers:
                self.runs[one.run_id].target += 1
                self.space.give_up(one.node, -one.gpus)
            taker.granted += 1  # asks no more
            return
        why = {
            _STARVED: f"run {taker.bid.run} has waited for {taker.bid.waited_s:.0f} s without an engine",
            _BELOW_FLOOR: f"run {taker.bid.run} has {taker.target} of the {taker.floor} engines of its floor",
            _BY_VALUE: f"one of run {taker.bid.run} saves {taker.next:.3g}",
        }[rank]
        for one, last, times in given:
            giver = self.runs[one.run_id]
            words.append(f"{why}; this one of run {giver.bid.run} {last:.3g} GPU-s a GPU-s")
            if rank == _BY_VALUE:
                words[-1] += (
                    f", which counts {times:.3g} times: run {giver.bid.run} keeps {giver.target} engines, its share is {giver.share:.3g}; "
                    f"run {taker.bid.run} comes to {taker.target + 1}, its share is {taker.share:.3g}"
                )
            self.leaving[one.intent_id] = words[-1]
        self.moves.append(f"{len(losers)} of run {self.runs[losers[0].run_id].bid.run} for {taker.bid.run}")
        self._give(taker, nodes)

    def _set_aside(self, run: _Run) -> None:
        """No node is free for a run that starves before young engines have had their time: one is kept for it meanwhile, where that is
        soonest. What may leave leaves, nobody else starts there."""
        gpus, young, old = Counter[str](), dict[str, float](), dict[str, list[HeldEngine]]()
        for one in self.held:
            if not one.node or one.fixed or one.intent_id in self.leaving or one.run_id == run.bid.run_id:
                continue
            gpus[one.node] += one.gpus
            stays_s = self.rules.stays_s(one)
            if stays_s <= 0:
                old.setdefault(one.node, []).append(one)
            else:
                young[one.node] = max(young.get(one.node, 0.0), stays_s)
        fitting = [
            node
            for node in sorted(self.space.open(run.bid))
            if node not in self.kept and gpus[node] and gpus[node] + self.space.idle(node) >= run.bid.gpus
        ]
        if not fitting:
            return
        node = min(fitting, key=lambda node: (young.get(node, 0.0), node))
        for one in old.get(node, ()):
            giver = self.runs.get(one.run_id)
            if giver is not None and giver.target > 0 and not giver.granted:
                giver.target -= 1
                self.leaving[one.intent_id] = (
                    f"node {node} is kept for run {run.bid.run}, which has waited for {run.bid.waited_s:.0f} s"
                )
        self.kept[node] = run.bid.run_id
        self.set_aside[run.bid.run_id] = run.bid.gpus
        self.space.close(node)

    # ---------------------------------------------------------------- what came of it

    def result(self) -> Division:
        rows: list[Mapping[str, float | str]] = [
            {
                "run": run.bid.run,
                "owner": run.bid.owner,
                "share": run.bid.share,
                "wants": run.bid.engines,
                "has": run.has,
                "gets": run.target,
                "gpus": run.bid.all_gpus,
                "floor": run.floor,
                "engines_of_share": round(run.share, 3),
                "last": round(run.last, 6),
                "next": round(run.next, 6),
                "waited_s": round(run.bid.waited_s, 1),
            }
            for run in self.runs.values()
        ]
        words = [
            f"run {run.bid.run} gets {run.target} of {run.bid.engines} engines (its last saves {run.last:.3g}, one more {run.next:.3g})"
            for run in self.runs.values()
        ]
        engines = {bid.run_id: 0 for bid in self.bids} | {
            run_id: run.target for run_id, run in self.runs.items()
        }
        return Division(
            engines,
            dict(self.leaving),
            tuple(self.turns),
            dict(self.kept),
            tuple(rows),
            "; ".join([*words, *self.moves]),
        )
