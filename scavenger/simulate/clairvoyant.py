"""The clairvoyant policy: a feasible schedule by whoever knows every length, engine and loss beforehand. What `bound` cannot promise.

Groups run in the order of what they have yet to generate, the least first, over all engines alike: groups become whole all the time and the
trainer has work, which on real lengths is worth more than a short tail (tried: longest first, longest on harvested engines only, and
mixtures). The window is searched. With B samples at a time an engine spends a r / B, and their reading, on one with r tokens to come, so

    group j is whole when the engines there are have done the work of groups 1..j, but not before its longest sample can be
    the trainer takes whole groups in that order, from window + toggle on
    step(window) = when it has trained the last, update and publication

for a grid of windows, at each decision anew. Samples go to the engine that is done first with them, before others take it where one can be;
a tail on one engine moves where that pays. It knows what no other policy may (`Knows`, given by a simulation alone) and decides as any
other: through `RouterPolicy`, on the same engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scavenger.router.policy import Fact, Move, Placement, RunView, SampleView, StepSubmitted, WindowDecision, WorkerView
from scavenger.simulate.clairvoyant_model import Job, Line, Supply, in_turn, line, step_s, together
from scavenger.simulate.decode import EngineSpec
from scavenger.simulate.policies.even import even_share
from scavenger.simulate.trainer_model import TrainerSpec, gather_s, optimizer_s, rank_s

#: A sample counts in the cache with what it has, and with this share of its whole length at least: it grows.
STORED = 0.55
#: A closed window is opened again only for this share of what is left.
REOPEN_GAIN = 0.05
GRID = 24
AGAIN_S = (1.0, 20.0)
#: A move must end the later engine by so many seconds sooner, its prefill paid; and an evening-out takes at most so many.
MOVE_GAIN_S = 0.5
MOST_MOVES = 64
#: No engine holds more than this times its even share: others may be about to be there.
OVER_SHARE = 1.15


@dataclass(frozen=True, slots=True)
class Coming:
    """A harvested engine that will have its weights at `ready_at` and be taken at `lost_at`."""

    spec: EngineSpec
    ready_at: float
    lost_at: float


class Knows(Protocol):
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
        """Tokens that its answer will have."""

    def spec(self, worker: WorkerView) -> EngineSpec: ...

    def lost_at(self, worker: WorkerView) -> float:
        """When others take its GPUs; infinity when they never do."""

    def coming(self, now: float) -> Sequence[Coming]:
        """Harvested engines that start already or will."""


@dataclass(slots=True)
class _Group:
    """A group that is not whole: its samples' (view, tokens to come), those that wait, and its share of the trainer's time."""

    id: int
    samples: list[tuple[SampleView, int]] = field(default_factory=list)
    queued: list[tuple[SampleView, int]] = field(default_factory=list)
    train_s: float = 0.0
    rest: int = 0
    longest: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        return self.rest, self.id


@dataclass(slots=True)
class _State:
    """A step as planned from, made anew at each decision."""

    groups: list[_Group]  # in the order in which they run
    running: dict[int, list[tuple[SampleView, int]]]  # by worker
    whole_train_s: float
    alone: bool  # no harvested engine serves


class Clairvoyant:
    """A `RouterPolicy` for one run."""

    every_s = 15.0

    def __init__(self, knows: Knows) -> None:
        self._knows = knows
        self._curves: dict[EngineSpec, Line] = {}
        self._fleet: tuple[tuple[int, bool], ...] = ()
        self._decision: WindowDecision | None = None
        self._trains: dict[int, float] = {}

    def observe(self, fact: Fact, now: float) -> None:
        if isinstance(fact, StepSubmitted):
            self._decision = None
            self._trains.clear()

    # ---------------------------------------------------------------- what is so

    def _curve(self, spec: EngineSpec) -> Line:
        if spec not in self._curves:
            self._curves[spec] = line(spec)
        return self._curves[spec]

    def _state(self, view: RunView) -> _State:
        groups: dict[int, _Group] = {}
        members: dict[int, list[SampleView]] = {}
        running: dict[int, list[tuple[SampleView, int]]] = {}
        for sample in view.samples:
            members.setdefault(sample.group_id, []).append(sample)
            if sample.done:
                continue
            rest = max(1, self._knows.length(sample) - sample.length)
            group = groups.setdefault(sample.group_id, _Group(sample.group_id))
            group.samples.append((sample, rest))
            group.rest += rest
            group.longest = max(group.longest, rest)
            if sample.worker_id:
                running.setdefault(sample.worker_id, []).append((sample, rest))
        for queued in view.queued:
            group = groups[queued.group_id]
            group.queued.append((queued, max(1, self._knows.length(queued) - queued.length)))
        for group_id, samples in members.items():
            if group_id not in self._trains:
                self._trains[group_id] = self._train_s([one.prompt_tokens + self._knows.length(one) for one in samples])
        for group in groups.values():
            group.train_s = self._trains[group.id]
        whole = sum(self._trains[group_id] for group_id in members if group_id not in groups)
        # With reserved engines alone nothing is trained before all is generated, and no sample could go elsewhere: as they come, long and
        # short mixed, and as many at a time as an engine takes, keeps caches fullest.
        alone = all(worker.kind == "reserved" for worker in view.workers if worker.serves)
        order = sorted(groups.values(), key=lambda group: (0, group.id) if alone else group.rank)
        return _State(order, running, whole, alone)

    def _train_s(self, tokens: Sequence[int]) -> float:
        """A group's share of the trainer's time: work in balance over ranks, and its part of the micro-steps' overheads."""
        trainer = self._knows.trainer
        micro_steps = sum(tokens) / (trainer.ranks * self._knows.token_budget)
        work = rank_s(trainer, tokens) / trainer.ranks
        return max(work, micro_steps * gather_s(trainer)) + micro_steps * trainer.overhead_s

    # ---------------------------------------------------------------- window

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        reserved = [worker for worker in view.workers if worker.kind == "reserved"]
        if not view.step.samples or not reserved:
            return None
        if view.step.finished >= view.step.samples:
            return WindowDecision(True, f"all {view.step.samples} samples of step {view.step.step} are done")
        fleet = tuple((worker.id, worker.serves) for worker in view.workers)
        if self._decision is None or now >= self._decision.again_at or fleet != self._fleet:
            self._fleet = fleet
            self._decision = self._decide(view, reserved, now)
        return self._decision

    def _decide(self, view: RunView, reserved: Sequence[WorkerView], now: float) -> WindowDecision:
        state, supply = self._state(view), self._supply(view, len(reserved), now)
        spec = self._knows.spec(reserved[0])
        ends, to_the_end = self._predictor(state, supply, spec, len(reserved) + len(supply.since))
        sleep_s, wake_s = self._knows.toggles_s
        windows = [to_the_end * point / GRID for point in range(GRID + 1)]
        if not view.step.reserved_awake:
            stay = ends(0.0, 0.0)
            again = min(ends(window, sleep_s) for window in windows[1:]) + wake_s
            told = f"training on ends the step in {stay:.1f} s, opening again in {again:.1f} s"
            return WindowDecision(not again < stay * (1 - REOPEN_GAIN), told, now + AGAIN_S[1])
        found = [(ends(window, sleep_s), window) for window in windows]
        best, window_s = min(found)
        told = f"closing in {window_s:.1f} s ends the step in {best:.1f} s, now in {found[0][0]:.1f} s"
        close = window_s < AGAIN_S[0] and found[0][0] < math.inf
        return WindowDecision(close, told, now + (AGAIN_S[1] if close else _between(window_s / 2)))

    def _predictor(self, state: _State, supply: Supply, spec: EngineSpec, engines: int) -> tuple[Callable[[float, float], float], float]:
        """What is left of the step as a function of window and toggle, and when generation ends if the window stays open."""
        jobs, held_s, fits = self._jobs(state, spec, engines)
        end_s = optimizer_s(self._knows.trainer) + self._knows.publish_s
        held = [(float(one.prompt_tokens + one.length), rest) for group in state.groups for one, rest in group.samples]
        longest = sorted({group.longest for group in state.groups})
        trains = [group.train_s for group in state.groups]

        def whole(window_s: float) -> list[float]:
            paced = dict(zip(longest, together(held, self._curve(spec), longest, supply, window_s), strict=True))
            turns = [0.0] * len(jobs) if fits else in_turn(jobs, supply, held_s, window_s)
            return [max(turn, paced[group.longest]) for turn, group in zip(turns, state.groups, strict=True)]

        def ends(window_s: float, toggle_s: float) -> float:
            return step_s(whole(window_s), trains, state.whole_train_s, window_s, toggle_s) + end_s

        return ends, max(whole(math.inf))

    def _supply(self, view: RunView, reserved: int, now: float) -> Supply:
        here = [worker for worker in view.workers if worker.kind != "reserved" and worker.serves]
        coming = self._knows.coming(now)
        since = [0.0] * len(here) + [max(0.0, one.ready_at - now) for one in coming]
        until = [max(0.0, self._knows.lost_at(worker) - now) for worker in here] + [one.lost_at - now for one in coming]
        return Supply(reserved, tuple(since), tuple(until))

    def _jobs(self, state: _State, spec: EngineSpec, engines: int) -> tuple[list[Job], float, bool]:
        """Groups in order as work for engines of `spec`, the work of what is served at one time, and whether all samples run at once."""
        curve = self._curve(spec)
        samples = [one for group in state.groups for one in group.samples]
        have = [sample.prompt_tokens + sample.length for sample, _ in samples]
        each = sum(h + rest / 2 for h, (_, rest) in zip(have, samples, strict=True)) / len(samples)
        room = min(spec.max_sequences, spec.kv_capacity / each)
        batch = max(1.0, min(room, len(samples) / engines))
        pace = curve.step_s(batch, batch * each)
        token_s = spec.prefill_s(4096) / 4096
        jobs = []
        for group in state.groups:
            work = 0.0
            for sample, rest in group.samples:
                context = sample.prompt_tokens + sample.length
                work += curve.base * rest / batch + curve.work_s(context, rest) + (0.0 if sample.worker_id else context * token_s)
            jobs.append(Job(work, group.longest * pace, group.train_s))
        mean = sum(job.work_s for job in jobs) / len(samples)
        return jobs, batch * engines * mean, len(samples) <= room * engines

    # ---------------------------------------------------------------- placement

    def place(self, view: RunView, now: float) -> Sequence[Placement]:
        if not view.queued or not any(slot.leases < slot.max_batch for slot in view.slots()):
            return ()
        state = self._state(view)
        seats = self._seats(view, state, now)
        placed: list[Placement] = []
        for group in state.groups:
            for sample, rest in sorted(group.queued, key=lambda one: (-one[1], one[0].id)):
                fitting = [seat for seat in seats if seat.fits(sample, rest)]
                if not fitting:
                    return placed
                ending = [seat for seat in fitting if seat.with_s(sample, rest) <= seat.left_s]
                seat = min(ending or fitting, key=lambda one: (one.with_s(sample, rest), one.worker_id))
                seat.take(sample, rest)
                placed.append(Placement(sample.id, seat.worker_id, None, f"its group has {group.rest} tokens to come"))
        return placed

    def _seats(self, view: RunView, state: _State, now: float) -> list[_Seat]:
        seats = []
        most = math.ceil(OVER_SHARE * even_share(view))
        for worker in view.workers:
            if worker.serves:
                spec = self._knows.spec(worker)
                left_s = math.inf if worker.kind == "reserved" else self._knows.lost_at(worker) - now
                share = 0.0 if state.alone else STORED
                slots = min(worker.max_batch, spec.max_sequences, most)
                seat = _Seat(worker.id, slots, spec, self._curve(spec), share, left_s)
                for sample, rest in state.running.get(worker.id, ()):
                    seat.take(sample, rest, new=False)
                seats.append(seat)
        return seats

    # ---------------------------------------------------------------- the rest

    def rebalance(self, view: RunView, now: float) -> Sequence[Move]:
        """With an empty queue: from the engine that is done last to the one that is done first, while that pays.

        To reserved engines only when there are no others: what they hold when they sleep moves anyway.
        """
        if view.queued:
            return ()
        state = self._state(view)
        kinds = {worker.id: worker.kind for worker in view.workers}
        seats = self._seats(view, state, now)
        takers = seats if state.alone else [seat for seat in seats if kinds[seat.worker_id] != "reserved"]
        moves: list[Move] = []
        moved: set[int] = set()
        while len(seats) > 1 and len(moves) < MOST_MOVES:
            late = max(seats, key=lambda seat: (seat.drain_s, seat.worker_id))
            early = min(takers, key=lambda seat: (seat.drain_s, seat.worker_id))
            held = [one for one in state.running.get(late.worker_id, ()) if one[0].id not in moved and early.fits(*one)]
            gains = [(late.drain_s - max(late.without_s(*one), early.with_s(*one)), -one[0].id, one) for one in held]
            if not gains or max(gains)[0] < MOVE_GAIN_S:
                break
            gain, _, (sample, rest) = max(gains)
            late.give(sample, rest)
            early.take(sample, rest)
            moved.add(sample.id)
            moves.append(Move(sample.id, late.worker_id, early.worker_id, f"ends the later engine {gain:.1f} s sooner"))
        return moves

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        """All that it may have: their cost is not its objective, the step's time is."""
        return (view.max_engines if view.harvest else 0), f"run.max_engines = {view.max_engines}"


@dataclass(slots=True)
class _Seat:
    """An engine while samples are placed. `share`: see `STORED`. `left_s`: until others take it."""

    worker_id: int
    slots: int
    spec: EngineSpec
    curve: Line
    share: float = STORED
    left_s: float = math.inf
    longest: float = 0.0
    work_s: float = 0.0
    stored: float = 0.0
    rests: list[int] = field(default_factory=list)

    @property
    def drain_s(self) -> float:
        return self.curve.base * self.longest + self.work_s

    def _own_s(self, sample: SampleView, rest: int, new: bool) -> float:
        have = sample.prompt_tokens + sample.length
        return self.curve.work_s(have, rest) + (self.spec.prefill_s(have) if new else 0.0)

    def with_s(self, sample: SampleView, rest: int) -> float:
        return self.curve.base * max(self.longest, rest) + self.work_s + self._own_s(sample, rest, True)

    def without_s(self, sample: SampleView, rest: int) -> float:
        others = sorted(self.rests)
        others.remove(rest)
        return self.curve.base * max(others, default=0) + self.work_s - self._own_s(sample, rest, False)

    def fits(self, sample: SampleView, rest: int) -> bool:
        free = not self.share or self.stored + self._stored(sample, rest) <= self.spec.kv_capacity
        return len(self.rests) < self.slots and (free or not self.rests)

    def _stored(self, sample: SampleView, rest: int) -> float:
        have = sample.prompt_tokens + sample.length
        return max(have, self.share * (have + rest))

    def take(self, sample: SampleView, rest: int, new: bool = True) -> None:
        self.longest = max(self.longest, rest)
        self.work_s += self._own_s(sample, rest, new)
        self.stored += self._stored(sample, rest)
        self.rests.append(rest)

    def give(self, sample: SampleView, rest: int) -> None:
        self.work_s -= self._own_s(sample, rest, False)
        self.stored -= self._stored(sample, rest)
        self.rests.remove(rest)
        self.longest = max(self.rests, default=0)


def _between(seconds: float) -> float:
    return min(AGAIN_S[1], max(AGAIN_S[0], seconds))
