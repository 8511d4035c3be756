"""An inference service with a rollout engine on the same GPUs, in virtual time, by the policy that runs live. Pure.

    arrivals --> waiting --> prefill in chunks --> decode, a token a request and step        (one engine, as vLLM schedules)
                                  |
    each `poll_s`: histograms of the interval --> ServiceView --> policy --> budget --> samples of the guest --> steps take longer

A step of the service costs what `decode.SimulatedEngine` says for its requests and the chunk of prompts in it. With n samples beside it
takes `Interference.factor(n)` times as long: that is an assumption, and no GPU was measured for it. The policy sees what a live one sees:
latencies in the buckets of a server's histograms, and the queue when it polls. Not in it: prefills of the guest's samples, and the memory
that it takes from the service's KV cache.

Owns the service, the guest and what is counted of both. Knows no policy but by its call.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scavenger.guest import latencies
from scavenger.guest.metrics import Histogram, ServiceReading
from scavenger.guest.window import Window
from scavenger.policy.serving import Objective, ServiceView, ServingDecision
from scavenger.simulate.decode import SimulatedEngine

#: The bounds of vLLM 0.32, vllm/v1/metrics/buckets.py: what its page can tell of a latency.
TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    math.inf,
)  # fmt: skip
TPOT_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, math.inf,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """What a page of metrics says: bounds of TTFT's and TPOT's buckets, and whether the age of the oldest request without a token."""

    ttft: tuple[float, ...] = TTFT_BOUNDS
    tpot: tuple[float, ...] = TPOT_BOUNDS
    oldest: bool = False


#: By the page of vLLM's server; by that of `scavenger guest-proxy` before it.
BY_SERVER, BY_PROXY = MetricsPage(), MetricsPage(latencies.BOUNDS, latencies.BOUNDS, oldest=True)


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt: int
    completion: int


@dataclass(frozen=True, slots=True)
class Interference:
    """How much longer a step of the service takes: `fixed` for a guest that generates at all, `each` for each of its samples."""

    fixed: float
    each: float

    def factor(self, samples: int) -> float:
        return 1 + self.fixed + self.each * samples if samples else 1.0

    def most(self, ratio: float, cap: int) -> int:
        """The most samples with which a step takes at most `ratio` times as long."""
        if self.factor(1) > ratio:
            return 0
        return (
            cap
            if not self.each or math.isinf(ratio)
            else min(cap, math.floor((ratio - 1 - self.fixed) / self.each + 1e-9))
        )


@dataclass(frozen=True, slots=True)
class GuestTimes:
    """`wake_s`: from a budget to the first samples of an engine that slept. `stop_s`: from a lower budget to fewer samples."""

    wake_s: float = 3.0
    stop_s: float = 0.1


#: A budget, or the decision that says one.
Budget = Callable[[ServiceView, float], int | ServingDecision]


@dataclass(slots=True)
class _Request:
    arrival: Arrival
    prefilled: int = 0
    made: int = 0
    first_s: float = 0.0


@dataclass(slots=True)
class ServedRequest:
    """`tpot_s`: mean over its tokens but the first; 0 for a completion of one token."""

    at_s: float
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class Interval:
    """One polling interval: exact latencies, the queue at its end, and the guest's samples. `gaps`: (seconds, how many tokens).

    `sample_s`: seconds of samples within it.
    """

    end_s: float
    ttfts: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    waiting: int = 0
    running: int = 0
    sample_s: float = 0.0


@dataclass(slots=True)
class ServingOutcome:
    requests: list[ServedRequest] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    wakes: int = 0
    cuts: int = 0


@dataclass(slots=True)
class _Guest:
    """The samples beside the service, as the budget changes: more at once while it is awake, after `wake_s` where it slept."""

    times: GuestTimes
    samples: int = 0
    budget: int = 0
    pending: deque[tuple[float, int]] = field(default_factory=deque)
    peak: int = 0

    def order(self, budget: int, now: float, out: ServingOutcome) -> None:
        if budget == self.budget:
            return
        asleep = self.budget == 0
        out.wakes += asleep
        out.cuts += budget == 0
        delay = self.times.wake_s if asleep else self.times.stop_s if budget < self.budget else 0.0
        self.budget = budget
        while self.pending and self.pending[-1][1] > budget:
            self.pending.pop()  # a raise that a cut overtook
        due = now + delay if not self.pending else max(now + delay, self.pending[-1][0])
        self.pending.append((due, budget))

    def advance(self, now: float) -> int:
        while self.pending and self.pending[0][0] <= now:
            self.samples = self.pending.popleft()[1]
        self.peak = max(self.peak, self.samples)
        return self.samples


class _Counts:
    """A server's histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts = bounds, [0] * len(bounds)

    def add(self, value: float, times: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += times

    def read(self) -> Histogram:
        return Histogram(self.bounds, tuple(map(float, itertools.accumulate(self.counts))))


def serve(
    engine: SimulatedEngine,
    arrivals: Sequence[Arrival],
    interference: Interference,
    budget: Budget,
    *,
    times: GuestTimes | None = None,
    poll_s: float = 1.0,
    chunk: int = 2048,
    window: int = 30,
    page: MetricsPage = BY_SERVER,
) -> ServingOutcome:
    """Play the service over `arrivals`, in order of time, until the last request is done. `chunk`: tokens that a step may prefill.
    `window`: seconds that a p99 is of."""
    out = ServingOutcome()
    play = _Play(
        engine, interference, _Guest(times or GuestTimes()), budget, poll_s, chunk, window, page, out
    )
    play.run(deque(arrivals))
    return out


class _Play:
    def __init__(
        self,
        engine: SimulatedEngine,
        interference: Interference,
        guest: _Guest,
        budget: Budget,
        poll_s: float,
        chunk: int,
        window: int,
        page: MetricsPage,
        out: ServingOutcome,
    ) -> None:
        self.engine, self.interference, self.guest, self.budget = engine, interference, guest, budget
        self.poll_s, self.chunk, self.out = poll_s, chunk, out
        self.now = 0.0
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.context = 0  # tokens of all that run
        self.reserved = 0  # tokens of KV that what was admitted may come to
        self.interval = Interval(poll_s)
        self.ttft, self.tpot, self.oldest = _Counts(page.ttft), _Counts(page.tpot), page.oldest
        self.window = Window(window)
        self.window.view(0.0, self._reading(), 0)  # what the next ones are compared with
        self.flops_s = engine.gpus * engine.gpu.dense_flops * engine.efficiency.prefill_compute

    def run(self, arrivals: deque[Arrival]) -> None:
        while arrivals or self.waiting or self.running:
            while arrivals and arrivals[0].at_s <= self.now:
                self.waiting.append(_Request(arrivals.popleft()))
            if self.waiting or self.running:
                self._step()
            else:
                self._pass(min(arrivals[0].at_s, self.interval.end_s))

    def _pass(self, until: float) -> None:
        """Time goes on; polls that fall into it are made. Samples count as they were when it began."""
        samples = self.guest.advance(self.now)
        while self.interval.end_s <= until:
            self.interval.sample_s += samples * (self.interval.end_s - self.now)
            self.now = self.interval.end_s
            self._poll()
            samples = self.guest.advance(self.now)
        self.interval.sample_s += samples * (until - self.now)
        self.now = until

    def _poll(self) -> None:
        interval = self.interval
        interval.waiting, interval.running = len(self.waiting), len(self.running)
        view = self.window.view(self.now, self._reading(), self.guest.peak, self.guest.samples)
        assert view is not None, "no polls are further apart than a window"
        self.guest.peak = self.guest.samples
        self.out.intervals.append(interval)
        decided = self.budget(view, self.now)
        if isinstance(decided, ServingDecision) and decided.window_anew:
            self.window.begin_anew()
        budget = decided.budget if isinstance(decided, ServingDecision) else decided
        self.guest.order(budget, self.now, self.out)
        self.interval = Interval(interval.end_s + self.poll_s)

    def _reading(self) -> ServiceReading:
        interval = self.interval
        oldest_s = self.now - self.waiting[0].arrival.at_s if self.oldest and self.waiting else 0.0
        return ServiceReading(
            "", self.ttft.read(), self.tpot.read(), interval.waiting, interval.running, 0.0, oldest_s
        )

    def _step(self) -> None:
        """One step: a token of each request that runs, and a chunk of prompts."""
        batch = len(self.running)
        seconds = self.engine.step_s(batch, self.context) if batch else self.engine.efficiency.overhead_s
        left = self.chunk - batch
        began: list[_Request] = []
        while self.waiting and left > 0:
            request = self.waiting[0]
            whole = request.arrival.prompt + request.arrival.completion
            if not request.prefilled:
                full = batch + len(began) >= self.engine.max_sequences
                if full or (self.reserved and self.reserved + whole > self.engine.kv_capacity):
                    break
                self.reserved += whole
            new = min(left, request.arrival.prompt - request.prefilled)
            seconds += self._compute_s(new, request.prefilled)
            request.prefilled += new
            left -= new
            if request.prefilled >= request.arrival.prompt:
                began.append(self.waiting.popleft())
        seconds *= self.interference.factor(self.guest.advance(self.now))
        # The step's tokens are there at its end, and so are counted before a poll at that moment.
        before = self.now
        self._pass(min(before + seconds, math.nextafter(self.interval.end_s, 0)) if seconds else before)
        if self.now < before + seconds:
            self._pass(before + seconds)
        self._tokens(batch, seconds, began)

    def _tokens(self, batch: int, seconds: float, began: list[_Request]) -> None:
        if batch:
            self.tpot.add(seconds, batch)
            self.interval.gaps.append((seconds, batch))
            self.context += batch
            for request in self.running:
                request.made += 1
        for request in began:
            request.made, request.first_s = 1, self.now
            ttft = self.now - request.arrival.at_s
            self.ttft.add(ttft, 1)
            self.interval.ttfts.append(ttft)
            self.running.append(request)
            self.context += request.arrival.prompt + 1
        over = [one for one in self.running if one.made >= one.arrival.completion]
        if over:
            self.running = [one for one in self.running if one.made < one.arrival.completion]
        for request in over:
            self.context -= request.arrival.prompt + request.made
            self.reserved -= request.arrival.prompt + request.arrival.completion
            gaps = max(1, request.made - 1)
            self.out.requests.append(
                ServedRequest(
                    request.arrival.at_s,
                    request.first_s - request.arrival.at_s,
                    (self.now - request.first_s) / gaps,
                )
            )

    def _compute_s(self, new: int, cached: int) -> float:
        model = self.engine.model
        pairs = new * cached + new * (new + 1) / 2
        return (2 * model.matmul_parameters * new + model.attention_flops_per_pair * pairs) / self.flops_s


# ---------------------------------------------------------------- what came of it


def p99(values: Sequence[tuple[float, int]]) -> float | None:
    """Of (value, how often); None for none."""
    total = sum(times for _, times in values)
    seen = 0
    for value, times in sorted(values):
        seen += times
        if seen >= 0.99 * total:
            return value
    return None


def windows_within(out: ServingOutcome, objective: Objective, every: int = 30) -> tuple[int, int]:
    """Windows of so many polls in which both p99s were within the objective, and all in which the service was asked for anything."""
    good = seen = 0
    for start in range(0, len(out.intervals), every):
        part = out.intervals[start : start + every]
        ttft = p99([(value, 1) for one in part for value in one.ttfts])
        tpot = p99([gap for one in part for gap in one.gaps])
        if ttft is None and tpot is None and not any(one.waiting for one in part):
            continue
        seen += 1
        starved = ttft is None and any(one.waiting for one in part)
        late = [
            value is not None and most is not None and value > most
            for value, most in ((ttft, objective.ttft_p99_s), (tpot, objective.tpot_p99_s))
        ]
        good += not starved and not any(late)
    return good, seen


def requests_within(out: ServingOutcome, objective: Objective) -> float:
    """Share of requests whose TTFT and mean TPOT are within the objective's times."""
    ttft, tpot = objective.ttft_p99_s or math.inf, objective.tpot_p99_s or math.inf
    return sum(one.ttft_s <= ttft and one.tpot_s <= tpot for one in out.requests) / max(1, len(out.requests))


def slack_samples(
    alone: ServingOutcome, objective: Objective, interference: Interference, most: int, around: int = 2
) -> list[int]:
    """For each polling interval of the service alone: the samples with which its p99s would have stayed within the objective.

    Of the interval and `around` on either side, taken together. Hindsight: it takes each latency times `Interference.factor`, and leaves
    out that a slower step lets a queue grow, so that it is more than any policy can use.
    """
    found = []
    for n in range(len(alone.intervals)):
        part = alone.intervals[max(0, n - around) : n + around + 1]
        ttft = p99([(value, 1) for one in part for value in one.ttfts])
        tpot = p99([gap for one in part for gap in one.gaps])
        ratios = [
            promised / value
            for promised, value in ((objective.ttft_p99_s, ttft), (objective.tpot_p99_s, tpot))
            if promised is not None and value
        ]
        found.append(interference.most(min(ratios, default=math.inf), most))
    return found


def slack_used(out: ServingOutcome, slack: Sequence[int], poll_s: float = 1.0) -> float:
    """Share of the slack in which samples were generated. Samples beyond it count for nothing."""
    pairs = zip(out.intervals, slack, strict=False)  # with a guest the last requests end later
    used = sum(min(one.sample_s / poll_s, float(most)) for one, most in pairs)
    return used / sum(slack) if sum(slack) else 0.0
