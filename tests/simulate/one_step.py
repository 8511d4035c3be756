"""One training step played out with real `EngineBatch` engines and the trainer model, under any plan: what a bound must never exceed.

A plan says where a waiting sample goes, when the reserved engines close and open, and which samples move and when. Everything else is the
oracle's model: an engine that is taken loses its KV, a closed window sends its samples back with their tokens, the trainer trains whatever
groups are complete whenever it has the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.oracle import OracleStep
from scavenger.simulate.sequences import EngineBatch, Finished, SimulatedRequest
from scavenger.simulate.trainer_model import micro_step_s, pack


class Plan(Protocol):
    """`where`: an engine of `up` for a waiting sample, or None to let it wait. Called again whenever anything changes."""

    def where(self, key: int, generated: int, up: Sequence[int], play: Play) -> int | None: ...

    def moves(self, play: Play) -> Sequence[tuple[int, int, int]]:
        """(sample, from engine, to engine) to move now; asked at each of `times`."""

    def awake(self, play: Play) -> bool:
        """Whether reserved engines should generate now; asked at each of `times`, and when the trainer has nothing to do."""

    @property
    def times(self) -> Sequence[float]: ...


@dataclass
class Play:
    """The state of one step at `now`. Samples are numbered group after group."""

    step: OracleStep
    plan: Plan
    now: float = 0.0
    batches: dict[int, EngineBatch] = field(default_factory=dict)
    load: dict[int, int] = field(default_factory=dict)  # samples of each engine, with those being placed
    waiting: dict[int, int] = field(default_factory=dict)  # sample -> generated
    finished: dict[int, float] = field(default_factory=dict)
    generating: bool = True  # reserved engines have the GPUs
    toggle_until: float = 0.0
    train_until: float = -1.0
    in_training: list[int] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    decoded: int = 0
    placings: int = 0  # how often waiting samples were offered

    def __post_init__(self) -> None:
        self.group_of: list[int] = []
        self.target: list[int] = []
        for index, group in enumerate(self.step.groups):
            self.group_of += [index] * len(group.targets)
            self.target += group.targets
        self.keys_of = [
            [key for key, of in enumerate(self.group_of) if of == index]
            for index in range(len(self.step.groups))
        ]
        self.waiting = dict.fromkeys(range(len(self.target)), 0)
        self.generating = self.step.awake
        self.times = sorted(
            {*self.plan.times, *(t for engine in self.step.engines for one in engine.intervals for t in one)}
        )

    @property
    def reserved(self) -> list[int]:
        return [index for index, engine in enumerate(self.step.engines) if engine.reserved]

    def harvested_later(self) -> bool:
        """Whether any harvested engine is there now or will be."""
        return any(
            not engine.reserved and end > self.now
            for engine in self.step.engines
            for _, end in engine.intervals
        )

    def up(self) -> list[int]:
        found = []
        for index, engine in enumerate(self.step.engines):
            here = any(start <= self.now < end for start, end in engine.intervals)
            if here and (not engine.reserved or (self.generating and self.now >= self.toggle_until)):
                found.append(index)
        return found

    def request(self, key: int, generated: int) -> SimulatedRequest:
        group = self.group_of[key]
        return SimulatedRequest(
            key, group, self.step.groups[group].prompt_tokens, generated, self.target[key]
        )

    def run(self) -> float:
        """When the step's version is published."""
        for _ in range(1_000_000):
            self._settle()
            if len(self.trained) == len(self.step.groups):
                return self.now + self.step.end_s
            self.now = self._next()
            assert self.now < math.inf, "the plan leaves samples waiting for ever"
        raise AssertionError("a step without an end")

    def _next(self) -> float:
        due = [batch.next_time() for batch in self.batches.values()]
        due += [t for t in (self.toggle_until, self.train_until, *self._rewards()) if t > self.now]
        due += [t for t in self.times if t > self.now][:1]
        return min(due, default=math.inf)

    def _rewards(self) -> list[float]:
        return [self.ready_at(group) for group in range(len(self.step.groups)) if group not in self.trained]

    def ready_at(self, group: int) -> float:
        return max(self.finished.get(key, math.inf) for key in self.keys_of[group]) + self.step.reward_s

    def _settle(self) -> None:
        for index in list(self.batches):
            for one in self.batches[index].advance(self.now):
                if isinstance(one, Finished):
                    self.finished[one.key] = one.time_s
        up = self.up()
        for index in [index for index in self.batches if index not in up]:
            self._stop(index)
        for index in up:
            self.batches.setdefault(index, EngineBatch(self.step.engines[index].spec, self.now))
        if self.now in self.times or self.now == 0:
            for key, here, there in self.plan.moves(self):
                self._move(key, here, there)
        self._train()
        self._place()

    def _stop(self, index: int) -> None:
        batch = self.batches.pop(index)
        for key in list(batch):
            self.waiting[key] = batch.remove(key, self.now)
        self.decoded += batch.decoded_tokens

    def _move(self, key: int, here: int, there: int) -> None:
        if here in self.batches and there in self.batches and key in self.batches[here]:
            generated = self.batches[here].remove(key, self.now)
            self.batches[there].add([self.request(key, generated)], self.now)

    def _place(self) -> None:
        up = sorted(self.batches)
        self.placings += 1
        self.load = {index: batch.size for index, batch in self.batches.items()}
        given: dict[int, list[SimulatedRequest]] = {}
        for key, generated in sorted(self.waiting.items()):
            index = self.plan.where(key, generated, up, self) if up else None
            if index is not None:
                given.setdefault(index, []).append(self.request(key, generated))
                self.load[index] += 1
                del self.waiting[key]
        for index, requests in given.items():
            self.batches[index].add(requests, self.now)

    def _train(self) -> None:
        if self.train_until >= 0 and self.now >= self.train_until:
            self.trained.update(self.in_training)
            self.in_training, self.train_until = [], -1.0
        if self.train_until >= 0 or self.now < self.toggle_until:
            return
        wanted = self.plan.awake(self) and len(self.finished) < len(self.target)
        if self.reserved and wanted != self.generating:
            self._toggle(wanted)
        elif not self.generating or not self.reserved:
            ready = [
                group
                for group in range(len(self.step.groups))
                if group not in self.trained and self.ready_at(group) <= self.now
            ]
            if ready:
                self._begin(ready)

    def _toggle(self, wanted: bool) -> None:
        self.generating = wanted
        self.toggle_until = self.now + (self.step.to_generating_s if wanted else self.step.to_training_s)
        if not wanted:
            for index in self.reserved:
                if index in self.batches:
                    self._stop(index)
        if self.toggle_until == self.now:
            self._settle()

    def _begin(self, ready: list[int]) -> None:
        spec = self.step.trainer
        lengths = [
            self.step.groups[group].prompt_tokens + target
            for group in ready
            for target in self.step.groups[group].targets
        ]
        micro_steps = pack(spec.model, lengths, spec.ranks, self.step.token_budget)
        self.in_training = ready
        self.train_until = self.now + sum(micro_step_s(spec, by_rank) for by_rank in micro_steps)


@dataclass
class Fixed:
    """Each sample to the engine it is given; reserved engines generate until `close_s`, then for as long as only they can."""

    to: Mapping[int, int]
    close_s: float
    times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.times = (self.close_s,)

    def where(self, key: int, generated: int, up: Sequence[int], play: Play) -> int | None:
        wanted = self.to[key]
        return wanted if wanted in up else min(up, key=lambda index: (play.load[index], index))

    def moves(self, play: Play) -> Sequence[tuple[int, int, int]]:
        return ()

    def awake(self, play: Play) -> bool:
        return play.now < self.close_s or not play.harvested_later()
