"""The clairvoyant policy: a feasible schedule by whoever knows every length, engine and loss beforehand. What `bound` cannot promise.

Groups run in the order of what they have yet to generate, the least first, over all engines alike: groups become whole all the time and the
trainer has work, which on real lengths is worth more than a short tail (tried: longest first, longest on harvested engines only, and
mixtures). The window is searched. With B samples at a time an engine spends a r / B, and their reading, on one with r tokens to come, so

    group j is whole when the engines there are have done the work of groups 1..j, but not before its longest sample can be
    the trainer takes whole groups in that order, from window + toggle on
    step(window) = when it has trained the last, update and publication

for the windows that `clairvoyant_plan` looks at, at each decision anew. Samples go to the engine that is done first with them, before
others take it where one can be; a tail on one engine moves where that pays. It knows what no other policy may (`GroundTruth`, given by a
simulation alone) and decides as any other: through `RouterPolicy`, on the same engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from benchmarks.baselines.clairvoyant.plan import line, plan, share_of
from benchmarks.baselines.clairvoyant.seats import (
    MOVE_GAIN_S,
    STORED,
    KnownSample,
    Order,
    PlannedEngine,
    best_move,
)
from scavenger.policy.forecast.service import Samples
from scavenger.policy.forecast.speed import SpeedCurve
from scavenger.policy.forecast.step import Costs, EnginePool, Situation
from scavenger.policy.interface import (
    EngineProgress,
    Fact,
    RunView,
    SampleFinished,
    SampleMove,
    SamplePlacement,
    SampleView,
    StepFinished,
    StepSubmitted,
    WindowDecision,
    WorkerView,
)
from scavenger.policy.seed_window import limit_of
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.policies import even_share
from scavenger.simulate.trainer_model import TrainerSpec, gather_s, optimizer_s, rank_s

AGAIN_S = (1.0, 20.0)
#: A fleet that changes from one moment to the next, as it loads a version engine by engine, is planned for again after this.
PAUSE_S = 1.0
#: An order of samples, and engines as it fills them, are good for this long.
ORDER_S = 10.0
#: An evening-out takes at most so many moves.
MOST_MOVES = 64
#: No engine holds more than this times its even share: others may be about to be there.
OVER_SHARE = 1.15


@dataclass(frozen=True, slots=True)
class ExpectedEngine:
    """A harvested engine that will have its weights at `ready_at` and be taken at `lost_at`."""

    spec: SimulatedEngine
    ready_at: float
    lost_at: float


class GroundTruth(Protocol):
    """What only a simulation can tell. Times on the same clock as `now`."""

    @property
    def trainer(self) -> TrainerSpec: ...

    @property
    def token_budget(self) -> int: ...

    @property
    def toggles_s(self) -> tuple[float, float]:
        """To training, and back to generating."""

    @property
    def publish_s(self) -> float: ...

    def length(self, sample: SampleView) -> int:
        """Tokens that its completion will have."""

    def spec(self, worker: WorkerView) -> SimulatedEngine: ...

    def lost_at(self, worker: WorkerView) -> float:
        """When others take its GPUs; infinity when they never do."""

    def coming(self, now: float) -> Sequence[ExpectedEngine]:
        """Harvested engines that start already or will."""


#: What a plan rests on: whether reserved engines are awake, how many there are, and the harvested ones that serve.
FleetKey = tuple[bool, int, tuple[int, ...]]


@dataclass(slots=True)
class _Group:
    """A group that is not whole: its samples' (view, tokens to come), and the tokens of those done."""

    id: int
    samples: list[tuple[SampleView, int]] = field(default_factory=list)
    done_tokens: int = 0
    rest: int = 0


@dataclass(slots=True)
class _State:
    """A step as planned from, made anew at each decision."""

    groups: list[_Group]  # in the order in which they run
    running: dict[int, list[tuple[SampleView, int]]]  # by worker
    tokens: float  # of the whole step
    whole_groups: int
    whole_tokens: float
    alone: bool  # no harvested engine serves


class OracleSchedule:
    """A `RouterPolicy` for one run."""

    every_s = 15.0

    def __init__(self, knows: GroundTruth) -> None:
        self._truth = knows
        self._curves: dict[SimulatedEngine, SpeedCurve] = {}
        self._fleet: FleetKey = (False, 0, ())
        self._decision: WindowDecision | None = None
        self._closes_at: float | None = None  # as decided last
        # What is the same all through a step: each sample's tokens, each group's with its prompts, and its share of the training.
        self._ends: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._trains: dict[int, float] = {}
        self._unseen = True  # samples may have come since these were looked up
        self._order: Order | None = None
        self._came: object = None  # `RunView.came` when the order last knew all that waits
        self._share = self._limit = (
            math.inf
        )  # of an even share, and samples that each engine serves at a time
        self._unserved = True  # something came or went since that was worked out
        self._decided_at = -math.inf
        self._served: tuple[FleetKey, float] | None = None  # for whom and when, within this step
        self._trained = self._trained_at = 0.0  # tokens, and until when they are counted

    def observe(self, fact: Fact, now: float) -> None:
        match fact:
            case SampleFinished():
                if self._order is not None:
                    self._order.ended(fact.worker_id, fact.sample_id)
            case StepSubmitted():
                self._order = self._decision = self._served = None
                self._unserved = self._unseen = True
                self._trained = 0.0
                for known in (self._ends, self._tokens, self._trains):
                    known.clear()
            case StepFinished():
                pass
            case _ if not isinstance(fact, EngineProgress):
                self._order, self._unserved = None, True  # the fleet is another

    # ---------------------------------------------------------------- what is so

    def _curve(self, spec: SimulatedEngine) -> SpeedCurve:
        if spec not in self._curves:
            self._curves[spec] = line(spec)
        return self._curves[spec]

    def _state(self, view: RunView) -> _State:
        samples = view.samples
        if self._unseen:
            self._read_lengths(samples)
            self._unseen = False
        ends, tokens = self._ends, self._tokens
        groups: dict[int, _Group] = {}
        running: dict[int, list[tuple[SampleView, int]]] = {}
        for sample in samples:
            if sample.done:
                continue
            end = ends[sample.id]
            rest = end - sample.length
            if rest < 1:
                rest = 1
            group_id, worker_id = sample.group_id, sample.worker_id
            group = groups.get(group_id)
            if group is None:
                group = groups[group_id] = _Group(group_id, [], tokens[group_id])
            one = sample, rest
            group.samples.append(one)
            group.rest += rest
            group.done_tokens -= sample.prompt_tokens + end
            if worker_id:
                if worker_id in running:
                    running[worker_id].append(one)
                else:
                    running[worker_id] = [one]
        whole = tokens.keys() - groups.keys() if samples else set[int]()
        whole_tokens = sum([tokens[group_id] for group_id in whole])
        all_tokens = whole_tokens + sum([tokens[group_id] for group_id in groups])
        # With reserved engines alone nothing is trained before all is generated, and no sample could go elsewhere: as they come, long and
        # short mixed, and as many at a time as an engine takes, keeps caches fullest.
        alone = all(worker.kind == "reserved" for worker in view.workers if worker.serves)
        order = sorted(groups.values(), key=lambda group: (0 if alone else group.rest, group.id))
        return _State(order, running, float(all_tokens), len(whole), float(whole_tokens), alone)

    def _read_lengths(self, samples: Sequence[SampleView]) -> None:
        """The truth about samples that were not seen before: it is asked once a step."""
        members: dict[int, list[SampleView]] = {}
        for sample in samples:
            if sample.id not in self._ends:
                members.setdefault(sample.group_id, []).append(sample)
        for group_id, unknown in members.items():
            for sample in unknown:
                self._ends[sample.id] = self._truth.length(sample)
            each = [one.prompt_tokens + self._ends[one.id] for one in unknown]
            self._tokens[group_id] = sum(each)
            self._trains[group_id] = self._train_s(each)

    def _train_s(self, tokens: Sequence[int]) -> float:
        """A group's share of the trainer's time: work in balance over ranks, and its part of the micro-steps' overheads."""
        trainer = self._truth.trainer
        micro_steps = sum(tokens) / (trainer.ranks * self._truth.token_budget)
        work = rank_s(trainer, tokens) / trainer.ranks
        return max(work, micro_steps * gather_s(trainer)) + micro_steps * trainer.overhead_s

    # ---------------------------------------------------------------- window

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        if not view.step.samples or not any(worker.kind == "reserved" for worker in view.workers):
            return None
        if view.step.finished >= view.step.samples:
            return WindowDecision(True, f"all {view.step.samples} samples of step {view.step.step} are done")
        fleet, known = _fleet_of(view), self._decision
        if known is not None and now < known.again_at:
            if fleet == self._fleet:
                return known
            if now < self._decided_at + PAUSE_S:
                return replace(known, again_at=self._decided_at + PAUSE_S)
        near = self._closes_at is not None and known is not None and fleet == self._fleet
        self._fleet, self._decided_at = fleet, now
        self._decision = self._decide(
            view, now, self._closes_at - now if near and self._closes_at is not None else None
        )
        return self._decision

    def _decide(self, view: RunView, now: float, near_s: float | None) -> WindowDecision:
        found = plan(self._situation(view, self._state(view), now, self._limit), near_s)
        left = found.window_s if found.awake and found.window_s < math.inf else AGAIN_S[1]
        close = not found.awake or (view.step.reserved_awake and left <= AGAIN_S[0])
        self._closes_at = None if close else now + found.window_s
        return WindowDecision(close, found.reason, now + (AGAIN_S[1] if close else _between(left / 2)))

    def _situation(self, view: RunView, state: _State, now: float, limit: float = math.inf) -> Situation:
        """What is left of the step, with nothing unknown in it."""
        knows = self._truth
        reserved = [worker for worker in view.workers if worker.kind == "reserved"]
        here = [worker for worker in view.workers if worker.kind != "reserved" and worker.serves]
        like = knows.spec(here[0] if here else reserved[0])
        until = [knows.lost_at(worker) - now for worker in here]
        fleet = [(max(0.0, at), -1.0) for at in until if at < math.inf]
        for one in knows.coming(now):
            fleet += [
                (max(0.0, one.ready_at - now), 1.0),
                *([(one.lost_at - now, -1.0)] if one.lost_at < math.inf else []),
            ]
        own = knows.spec(reserved[0]) if reserved else like
        sleep_s, wake_s = knows.toggles_s
        costs = Costs(
            prefill_s=like.prefill_s(4096) / 4096,
            train_s=sum(self._trains.values()) / state.tokens,
            round_groups=knows.trainer.ranks,
            sleep_s=sleep_s,
            wake_s=wake_s,
            finish_s=optimizer_s(knows.trainer) + knows.publish_s,
        )
        if not view.step.reserved_awake:
            since = max(self._trained_at, view.step.window_since + sleep_s)
            self._trained = min(state.whole_tokens, self._trained + max(0.0, now - since) / costs.train_s)
        self._trained_at = now
        ready = state.whole_tokens - self._trained
        return Situation(
            reserved=EnginePool(self._curve(own), float(len(reserved)), own.max_sequences, own.kv_capacity),
            harvested=EnginePool(self._curve(like), float(len(here)), like.max_sequences, like.kv_capacity),
            costs=costs,
            samples=_in_order(state),
            awake=view.step.reserved_awake,
            arrivals=tuple(fleet),
            ready_groups=round(state.whole_groups * ready / state.whole_tokens) if state.whole_tokens else 0,
            ready_tokens=ready,
            group_tokens={group.id: float(group.done_tokens) for group in state.groups},
            limit=limit,
        )

    # ---------------------------------------------------------------- placement

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        free = {
            slot.worker_id: slot.max_batch - slot.leases
            for slot in view.slots()
            if slot.leases < slot.max_batch
        }
        if not view.waits or not free:
            return ()
        if (
            self._order is None
            or now >= self._order.since + ORDER_S
            or not self._knows_all(self._order, view)
        ):
            self._order, self._came = self._ordered(view, now), view.came
        reasons, placed = self._order.reasons, self._order.place(view.is_waiting, free)
        return [SamplePlacement(sample_id, worker_id, reasons[sample_id]) for sample_id, worker_id in placed]

    def _knows_all(self, order: Order, view: RunView) -> bool:
        """Whether all that waits was ordered: looked at only when somebody may have come."""
        came = view.came
        if came != self._came and not order.knows({one.sample_id for one in view.waiting()}):
            return False
        self._came = came
        return True

    def _ordered(self, view: RunView, now: float) -> Order:
        state = self._state(view)
        fleet = _fleet_of(view), now
        # Reserved engines wake one after the other at one instant, and count as awake from the first on: that is worked out once.
        recent = self._served is not None and now < self._served[1] + PAUSE_S
        if self._unserved and fleet != self._served and not recent:
            if not state.alone:
                situation = self._situation(view, state, now)
                self._share = share_of(situation, self._share)
                self._limit = limit_of(situation, self._share)
            self._unserved, self._served = False, fleet
        moved: list[KnownSample] = []
        fresh: list[KnownSample] = []
        reasons: dict[int, str] = {}
        for group in state.groups:
            queued = [one for one in group.samples if not one[0].worker_id]
            reason = f"its group has {group.rest} tokens to come" if queued else ""
            for sample, rest in sorted(queued, key=lambda one: (-one[1], one[0].id)):
                (moved if sample.length > 0 else fresh).append(_known(sample, rest))
                reasons[sample.id] = reason
        return Order(moved + fresh, self._planned_engines(view, state, now), now, reasons)

    def _planned_engines(self, view: RunView, state: _State, now: float) -> list[PlannedEngine]:
        seats = []
        most = min(math.ceil(OVER_SHARE * even_share(view)), 1 << 20 if state.alone else self._limit)
        for worker in view.workers:
            if worker.serves:
                spec = self._truth.spec(worker)
                left_s = math.inf if worker.kind == "reserved" else self._truth.lost_at(worker) - now
                share = 0.0 if state.alone else STORED
                slots = int(min(worker.max_batch, spec.max_sequences, most))
                planned = PlannedEngine(worker.id, slots, spec, self._curve(spec), share, left_s)
                planned.fill([_known(sample, rest) for sample, rest in state.running.get(worker.id, ())])
                seats.append(planned)
        return seats

    # ---------------------------------------------------------------- the rest

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        """With an empty queue: from the engine that is done last to the one that is done first, while that pays.

        To reserved engines only when there are no others: what they hold when they sleep moves anyway.
        """
        if next(iter(view.waiting()), None) is not None:
            return ()
        state = self._state(view)
        kinds = {worker.id: worker.kind for worker in view.workers}
        seats = self._planned_engines(view, state, now)
        takers = (
            seats if state.alone else [planned for planned in seats if kinds[planned.worker_id] != "reserved"]
        )
        moves: list[SampleMove] = []
        moved: set[int] = set()
        while len(seats) > 1 and takers and len(moves) < MOST_MOVES:
            late = max(seats, key=lambda planned: (planned.drain_s, planned.worker_id))
            early = min(takers, key=lambda planned: (planned.drain_s, planned.worker_id))
            found = best_move(late, early, moved) if late.drain_s - early.drain_s >= MOVE_GAIN_S else None
            if found is None:
                break
            gain, one, prefill_s = found
            late.remove(one.id)
            early.take(one, prefill_s)
            moved.add(one.id)
            moves.append(
                SampleMove(
                    one.id, late.worker_id, early.worker_id, f"ends the later engine {gain:.1f} s sooner"
                )
            )
        if moves:
            self._order = None
        return moves

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        """All that it may have: their cost is not its objective, the step's time is."""
        return (view.max_engines if view.harvest else 0), f"run.max_engines = {view.max_engines}"


def _in_order(state: _State) -> Samples:
    """What is left to generate: what runs, then what waits, group after group."""
    groups = sorted([group.id for group in state.groups])
    positions = {group_id: place for place, group_id in enumerate(groups)}
    runs: list[tuple[int, int, int]] = []
    waits: list[tuple[int, int, int]] = []
    for group in state.groups:
        place = positions[group.id]
        for one, rest in group.samples:
            (runs if one.worker_id else waits).append((one.prompt_tokens + one.length, rest, place))
    have, rests, group_of = np.array(runs + waits, np.int64).reshape(-1, 3).T
    return Samples(have.astype(np.float64), rests.astype(np.float64), group_of.astype(np.intp), tuple(groups))


def _fleet_of(view: RunView) -> FleetKey:
    reserved = sum(worker.kind == "reserved" for worker in view.workers)
    return (
        view.step.reserved_awake,
        reserved,
        tuple(worker.id for worker in view.workers if worker.kind != "reserved" and worker.serves),
    )


def _known(sample: SampleView, rest: int) -> KnownSample:
    return KnownSample(sample.id, sample.prompt_tokens + sample.length, rest)


def _between(seconds: float) -> float:
    return min(AGAIN_S[1], max(AGAIN_S[0], seconds))
