"""Prefill tokens that agents' turns cost, by how they are routed: always elsewhere, always back to their cache, ours. Simulated.

    python benchmarks/agent_turns.py [--seeds 20] [--engines 8] [--episodes 96] [--turns 12] [--lost-every-s 600] [--slots 8]

Episodes of many turns run on engines that are taken away at random and replaced. A turn's prompt is all before it and what a tool
replied; an engine computes what its KV cache does not have. The decision is `scavenger.policy.affinity.place`, as the router calls it,
with the router's own belief of what is cached (`turns._has_still`'s rule); the caches are simulated exactly and forget what was used
longest ago. Of an engine's prefills one runs at a time, and a token of each of its samples takes as long as its batch had made it when
the turn began.

Printed are ratios to ours of the same seed, medians with the least and the most over the seeds: prefill tokens computed, and seconds from
a turn's call to its last token (a router that always returns computes little and waits).
"""

from __future__ import annotations

import argparse
import functools
import heapq
import math
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from scavenger.policy.affinity import Engine, Placed, Speeds, Waiting, place

#: Of an engine, about an 8B model on one GPU: seconds a prefilled token, a decode step alone and for each sample more.
PREFILL_S, STEP_S, STEP_MORE_S = 1 / 12_000, 0.011, 0.00035
CACHE_TOKENS = 160_000
START_S = 60.0
#: Tokens of a first prompt, of a completion and of what a tool replies (means; the last two are lognormal), seconds that it takes.
SYSTEM, COMPLETION, OBSERVATION, TOOL_S, SIGMA = 3_000, 220, 700, 4.0, 0.8


@dataclass(slots=True)
class Site:
    """`lost_every_s`: mean life of an engine; 0: none is lost."""

    engines: int
    slots: int
    episodes: int
    turns: int
    lost_every_s: float


@dataclass(slots=True)
class Turn:
    """A turn that is asked for, waits or runs. `context`: its prompt; `length`: tokens to come; `seen`: since when it waits for a cache."""

    episode: int
    number: int
    context: int
    length: int
    asked_at: float
    held_at: float | None = None
    engine: int = 0


@dataclass(slots=True)
class Machine:
    """An engine. `cache`: episode -> tokens, the longest unused first. `entered`: tokens that went into it, as the router counts."""

    id: int
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    running: dict[int, Turn] = field(default_factory=dict)  # by episode
    prefilled_until: float = 0.0
    entered: int = 0

    @property
    def step_s(self) -> float:
        return STEP_S + STEP_MORE_S * len(self.running)

    def store(self, episode: int, tokens: int) -> None:
        self.cache[episode] = tokens
        self.cache.move_to_end(episode)
        held = sum(self.cache.values())
        for other in list(self.cache):
            if held <= CACHE_TOKENS:
                break
            if other not in self.running:
                held -= self.cache.pop(other)


class Play:
    """One simulation."""

    def __init__(self, site: Site, routing: Routing, seed: int) -> None:
        self.site, self.routing, self.rng = site, routing, random.Random(seed)
        self.now, self.order, self.next_id = 0.0, 0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.machines: dict[int, Machine] = {}
        self.queue: list[Turn] = []
        self.known: dict[int, tuple[int, int, int]] = {}  # episode -> machine, tokens, its `entered` by then
        self.speeds = Speeds()
        self.prefilled = 0
        self.seconds: list[float] = []  # of each turn
        self.left = site.episodes
        # Drawn ahead: every routing plays the same episodes.
        self.plan = [
            [
                (self._draw(COMPLETION), self._draw(OBSERVATION), self.rng.expovariate(1 / TOOL_S))
                for _ in range(site.turns)
            ]
            for _ in range(site.episodes)
        ]
        self.losses = random.Random(seed + 1)

    def _draw(self, mean: float) -> int:
        return max(1, round(mean * self.rng.lognormvariate(-(SIGMA**2) / 2, SIGMA)))

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + seconds, self.order, what))

    def run(self) -> Play:
        for _ in range(self.site.engines):
            self.join()
        for episode in range(self.site.episodes):
            self.at(episode * 0.2, functools.partial(self.ask, episode, 0, SYSTEM))
        while self.left:
            self.now, _, what = heapq.heappop(self.events)
            what()
            self.route()
        return self

    def join(self) -> None:
        self.next_id += 1
        machine = self.machines[self.next_id] = Machine(self.next_id)
        if self.site.lost_every_s:
            self.at(self.losses.expovariate(1 / self.site.lost_every_s), lambda: self.lose(machine))

    def lose(self, machine: Machine) -> None:
        """Its samples go on elsewhere; what they had generated is context there. (Their tokens so far: on average half.)"""
        del self.machines[machine.id]
        for turn in machine.running.values():
            done = turn.length // 2
            turn.context, turn.length, turn.held_at, turn.engine = (
                turn.context + done,
                turn.length - done,
                None,
                0,
            )
            self.queue.append(turn)
        machine.running.clear()
        self.at(START_S, self.join)

    def ask(self, episode: int, number: int, context: int) -> None:
        self.queue.append(Turn(episode, number, context, self.plan[episode][number][0], self.now))

    def route(self) -> None:
        if not self.queue:
            return
        queue = list(self.queue)
        waiting = [self.waiting(at, turn) for at, turn in enumerate(queue)]
        machines = self.machines.values()
        engines = [Engine(m.id, len(m.running), self.site.slots, "", m.step_s) for m in machines]
        for placed in list(self.routing(waiting, engines, self.speeds)):
            turn = queue[placed.sample_id]
            if placed.waits:
                turn.held_at = self.now if turn.held_at is None else turn.held_at
            else:
                self.queue.remove(turn)
                self.begin(turn, self.machines[placed.worker_id])
        if self.queue:  # as the router's tick: what waits for a cache is looked at again
            self.at(0.25, lambda: None)

    def waiting(self, at: int, turn: Turn) -> Waiting:
        """As the router tells its routing of a turn, with the router's belief of what is cached."""
        cached: list[tuple[int, int]] = []
        machine_id, tokens, entered = self.known.get(turn.episode, (0, 0, 0))
        machine = self.machines.get(machine_id)
        if machine is not None and machine.entered - entered + tokens <= CACHE_TOKENS:
            cached.append((machine_id, min(tokens, turn.context)))
        since = self.now if turn.held_at is None else turn.held_at
        return Waiting(at, turn.context, self.now - since, cached)

    def begin(self, turn: Turn, machine: Machine) -> None:
        cached = min(machine.cache.get(turn.episode, 0), turn.context)
        new = turn.context - cached
        self.prefilled += new
        begin = max(self.now, machine.prefilled_until)
        machine.prefilled_until = begin + new * PREFILL_S
        self.speeds.prefilled(new, machine.prefilled_until - self.now)
        machine.running[turn.episode] = turn
        turn.engine = machine.id
        machine.store(turn.episode, turn.context)
        machine.entered += new
        ends = machine.prefilled_until + turn.length * machine.step_s - self.now
        self.at(ends, lambda: self.finish(turn, machine))

    def finish(self, turn: Turn, machine: Machine) -> None:
        if turn.engine != machine.id or machine.running.get(turn.episode) is not turn:
            return  # its engine was lost
        del machine.running[turn.episode]
        whole = turn.context + turn.length
        machine.store(turn.episode, whole)
        machine.entered += turn.length
        self.known[turn.episode] = machine.id, whole, machine.entered
        self.speeds.completed(turn.length)
        self.seconds.append(self.now - turn.asked_at)
        _, observation, tool_s = self.plan[turn.episode][turn.number]
        if turn.number + 1 < self.site.turns:
            self.at(tool_s, lambda: self.ask(turn.episode, turn.number + 1, whole + observation))
        else:
            self.left -= 1


# ---------------------------------------------------------------- routings


class _Slots:
    """Engines as they fill."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.by_id = {engine.worker_id: engine for engine in engines}

    def free(self, worker_id: int) -> bool:
        engine = self.by_id[worker_id]
        return engine.leases < engine.max_batch

    def emptiest(self, but: int = 0) -> int:
        """The one with the smallest share of its slots taken; 0: all others are full."""
        free = [(e.leases / e.max_batch, e.worker_id) for e in self.by_id.values() if e.leases < e.max_batch]
        return min((one for one in free if one[1] != but), default=(0.0, 0))[1]

    def take(self, worker_id: int) -> None:
        engine = self.by_id[worker_id]
        self.by_id[worker_id] = engine._replace(leases=engine.leases + 1)


def _home(sample: Waiting) -> int:
    """Who had the turn before; 0: it is not there any more, or has forgotten it, or there was none."""
    return sample.cached[0][0] if sample.cached else 0


def sticky(waiting: Iterable[Waiting], engines: Iterable[Engine], _speeds: Speeds) -> Iterator[Placed]:
    """Always back to the engine of the turn before, for however long that is full."""
    slots = _Slots(engines)
    for sample in waiting:
        home = _home(sample)
        if home not in slots.by_id:
            chosen, why = slots.emptiest(), "sticky, no engine has its prefix"
        else:
            chosen, why = home if slots.free(home) else 0, "sticky, it has the turn before"
        if chosen:
            slots.take(chosen)
            cached = sample.cached[0][1] if chosen == home else 0
            yield Placed(sample.sample_id, chosen, why, holder_id=home, context=sample.context, cached=cached)


def elsewhere(waiting: Iterable[Waiting], engines: Iterable[Engine], _speeds: Speeds) -> Iterator[Placed]:
    """Always the emptiest that did not have the turn before."""
    slots = _Slots(engines)
    for sample in waiting:
        chosen = slots.emptiest(but=_home(sample))
        if chosen:
            slots.take(chosen)
            yield Placed(sample.sample_id, chosen, "elsewhere, as the benchmark asks", context=sample.context)


#: As `affinity.place`, which is ours: in this simulation, and in the router of `agent_turns_live`.
Routing = Callable[[Iterable[Waiting], Iterable[Engine], Speeds], Iterator[Placed]]
ROUTINGS: dict[str, Routing] = {"always elsewhere": elsewhere, "always sticky": sticky, "ours": place}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one seed and routing: prefill tokens computed, mean and 95th percentile of a turn's seconds."""

    prefilled: int
    mean_s: float
    p95_s: float


def outcome(site: Site, routing: Routing, seed: int) -> Outcome:
    """Play one seed."""
    play = Play(site, routing, seed).run()
    ordered = sorted(play.seconds)
    return Outcome(play.prefilled, statistics.fmean(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1])


#: What is compared.
PICKS: tuple[Callable[[Outcome], float], ...] = (
    lambda found: found.prefilled,
    lambda found: found.mean_s,
    lambda found: found.p95_s,
)


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=96)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--lost-every-s", type=float, default=600.0)
    args = parser.parse_args()
    site = Site(args.engines, args.slots, args.episodes, args.turns, args.lost_every_s)
    found = {
        name: [outcome(site, routing, seed) for seed in range(args.seeds)]
        for name, routing in ROUTINGS.items()
    }
    base = found["ours"]
    print(f"{site}, {args.seeds} seeds; median [least, most]")
    print(
        f"{'':>18}  {'prefill tokens, M':>22}  {'of ours':>20}  {'turn, mean of ours':>20}  {'turn, p95 of ours':>20}"
    )
    for name, some in found.items():
        tokens = spread([one.prefilled / 1e6 for one in some])
        ratios = [
            spread([pick(one) / pick(ref) for one, ref in zip(some, base, strict=True)]) for pick in PICKS
        ]
        print(f"{name:>18}  {tokens:>22}  {ratios[0]:>20}  {ratios[1]:>20}  {ratios[2]:>20}")


if __name__ == "__main__":
    main()
