"""Whether an engine's logprobs disagree with the trainer's more than its peers' do: a wrong GPU is found by its numbers. Pure.

    rank 0  -- sums of each span: tokens, d, |d|, k3 -->  Window.add  -->  Window.judge(worker) -> Verdict | None

A span is the tokens of one sample that one worker generated; d = proximal - behaviour: the trainer's logprob of a token less the engine's.
An engine that draws from its own distribution q, where the trainer has p, has E[d] = -KL(q || p): 0 to rounding where both compute the
same. So two rates are compared, of all tokens in a worker's window: the signed one, d, in which honest rounding cancels and a wrong
distribution does not; and the absolute one, |d|, which also shows an engine that reports what it did not draw from.

    excess   the rate beyond the peers' median: over `floor`, and over what their own numbers make large (`ratio`)
    z        the excess / sqrt(se^2 + spread^2): se of the worker's own rate, over its spans; spread = 1.4826 MAD of its peers' rates

Both must be large. One odd sample makes se as large as the excess; an odd kind of GPU makes the spread large. Peers are the run's other
workers in the same steps, and the worker itself is among those whose median it is: where half of all disagree, it is not known which half
is wrong. With fewer than `peers` of them the run's own past stands in, which also moves as the policy learns: then `HISTORY_FACTOR` times
as much is asked for. It is one-sided: who agrees better than its peers is never wrong.
Owns the window, the test and its numbers. Knows no worker's state, no message and no reaction.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

#: Steps that a window spans at most: rates change as the policy learns, and peers' with them.
WINDOW_STEPS = 8
#: Workers that are remembered, those that were heard of last: fleets change.
MOST_WORKERS = 4096
#: Rates of the run's own past that are kept, and how many of them stand in for peers at least.
HISTORY, LEAST_HISTORY = 64, 3
#: A signed rate is large beside the peers' absolute one from this share of it on (times `ratio`): what is honest cancels.
SIGNED_SHARE = 0.1
HISTORY_FACTOR = 3.0
MOST_Z = 1e6
#: From the median absolute deviation to a normal distribution's deviation.
_MAD = 1.4826


class AgreementSpan(NamedTuple):
    """Sums over the tokens of one sample that one worker generated. `signed`, `absolute`: of d; `k3`: of exp(d) - d - 1."""

    sample_id: int
    worker_id: int
    tokens: int
    signed: float
    absolute: float
    k3: float


@dataclass(frozen=True, slots=True)
class AgreementRules:
    """`samples`, `tokens`: a window's least, before it is judged or compared with. `window`: its most samples. `floor`: nats a token."""

    samples: int = 16
    tokens: int = 256
    window: int = 64
    peers: int = 3
    ratio: float = 3.0
    z: float = 8.0
    floor: float = 0.002


DEFAULT_RULES = AgreementRules()


@dataclass(frozen=True, slots=True)
class Rates:
    """A worker's window, in nats a token. `absolute_se`, `signed_se`: standard errors, from how its spans differ."""

    samples: int
    tokens: int
    absolute: float
    signed: float
    k3: float
    absolute_se: float
    signed_se: float


@dataclass(frozen=True, slots=True)
class SuspectWorker:
    """A worker is suspect. `by`: "absolute" | "signed". `against`: "peers" | "history", of which `usual` and `spread` are."""

    worker_id: int
    by: str
    rates: Rates
    against: str
    compared: int
    usual: float
    spread: float
    z: float
    limit: float

    @property
    def value(self) -> float:
        return self.rates.absolute if self.by == "absolute" else self.rates.signed

    @property
    def reason(self) -> str:
        whom = f"{self.compared} peers" if self.against == "peers" else "the run's past and its peers"
        what = "absolute" if self.by == "absolute" else "signed"
        return (
            f"its logprobs disagree with the trainer's: {what} {self.value:+.3g} nats a token over {self.rates.tokens} tokens of "
            f"{self.rates.samples} samples, {whom} have {self.usual:+.3g} (z = {self.z:.1f}, {self.limit:.3g} from it is the limit)"
        )

    @property
    def numbers(self) -> dict[str, Any]:
        """For the ledger."""
        rates = self.rates
        return {
            "by": self.by,
            "against": self.against,
            "compared": self.compared,
            "samples": rates.samples,
            "tokens": rates.tokens,
            "absolute": rates.absolute,
            "signed": rates.signed,
            "k3": rates.k3,
            "usual": self.usual,
            "spread": self.spread,
            "z": self.z,
            "limit": self.limit,
        }


@dataclass(slots=True)
class _Spans:
    """The spans of one worker, oldest first: sample id -> (step, span). Said again, a span takes the place of the one before."""

    spans: OrderedDict[int, tuple[int, AgreementSpan]] = field(default_factory=OrderedDict)
    known: Rates | None = None
    fresh: bool = False  # something came since it was judged


class SpanWindow:
    """The last spans of each worker of one run."""

    def __init__(self, rules: AgreementRules) -> None:
        self.rules = rules
        self._step = 0
        self._workers: OrderedDict[int, _Spans] = OrderedDict()
        self._past: deque[Rates] = deque(maxlen=HISTORY)

    def add(self, step: int, spans: Iterable[AgreementSpan]) -> None:
        """Take in what was trained in `step`. A span that was said before counts once."""
        if step > self._step:
            self._turn_to(step)
        for span in spans:
            one = self._workers.pop(span.worker_id, None) or _Spans()
            self._workers[span.worker_id] = one
            if one.spans.get(span.sample_id) != (step, span):
                one.spans[span.sample_id] = (step, span)
                one.known, one.fresh = None, True
            while len(one.spans) > self.rules.window:
                one.spans.popitem(last=False)
        while len(self._workers) > MOST_WORKERS:
            self._workers.popitem(last=False)

    def forget(self, worker_id: int) -> None:
        """Its spans are no measure for other workers: it was found wrong."""
        self._workers.pop(worker_id, None)

    def _turn_to(self, step: int) -> None:
        """A step begins: what the last one showed becomes the run's past, and what is too old leaves the windows."""
        for worker_id in list(self._workers):
            one = self._workers[worker_id]
            if self._counts(rates := self._rates(one)):
                self._past.append(rates)
            for sample_id, (of, _) in list(one.spans.items()):
                if of <= step - WINDOW_STEPS:
                    del one.spans[sample_id]
                    one.known = None
            if not one.spans:
                del self._workers[worker_id]
        self._step = step

    def judge(self) -> list[SuspectWorker]:
        """Workers that are wrong, by what came since they were judged last, in the order of their ids."""
        rates = {worker_id: self._rates(one) for worker_id, one in self._workers.items()}
        enough = {worker_id: found for worker_id, found in rates.items() if self._counts(found)}
        past, everyone = list(self._past), list(enough.values())
        base = baseline(everyone) if len(everyone) > self.rules.peers else None
        verdicts = []
        for worker_id in sorted(worker_id for worker_id, one in self._workers.items() if one.fresh):
            self._workers[worker_id].fresh = False
            if worker_id not in enough:
                continue
            peers = [found for other, found in enough.items() if other != worker_id] if base is None else []
            against = base or history(peers, past)
            verdict = compare(worker_id, enough[worker_id], against, self.rules) if against else None
            verdicts += [verdict] if verdict is not None else []
        return verdicts

    def _rates(self, one: _Spans) -> Rates:
        one.known = one.known or rates_of([span for _, span in one.spans.values()])
        return one.known

    def _counts(self, rates: Rates) -> bool:
        return rates.samples >= self.rules.samples and rates.tokens >= self.rules.tokens


def rates_of(spans: Sequence[AgreementSpan]) -> Rates:
    """Rates over all tokens, with the standard errors of ratios of sums, spans being what varies (Cochran 1977, eq. 6.13)."""
    samples, tokens = len(spans), sum(span.tokens for span in spans)
    absolute = math.fsum(span.absolute for span in spans) / tokens if tokens else 0.0
    signed = math.fsum(span.signed for span in spans) / tokens if tokens else 0.0
    k3 = math.fsum(span.k3 for span in spans) / tokens if tokens else 0.0

    def se(sums: Iterable[tuple[float, int]], rate: float) -> float:
        if samples < 2 or not tokens:
            return math.inf
        squares = math.fsum((value - rate * n) ** 2 for value, n in sums)
        return math.sqrt(squares * samples / (samples - 1)) / tokens

    return Rates(
        samples,
        tokens,
        absolute,
        signed,
        k3,
        se(((span.absolute, span.tokens) for span in spans), absolute),
        se(((span.signed, span.tokens) for span in spans), signed),
    )


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a worker is compared with. `factor`: by how much more is asked for. `least`: the largest absolute rate of the few peers."""

    against: str
    absolute: tuple[float, float]  # median and spread
    signed: tuple[float, float]
    compared: int
    factor: float = 1.0
    least: float = 0.0


def baseline(everyone: Sequence[Rates]) -> Baseline:
    """Of all workers, the one that is judged among them: where half of them disagree, none is beyond the median."""
    absolute, signed = _usual([one.absolute for one in everyone]), _usual([one.signed for one in everyone])
    return Baseline("peers", absolute, signed, len(everyone) - 1)


def history(peers: Sequence[Rates], past: Sequence[Rates]) -> Baseline | None:
    """Of the run's past and the few peers that there are; None where that is too little."""
    if len(past) < LEAST_HISTORY:
        return None
    others = [*peers, *past]
    absolute, signed = _usual([one.absolute for one in others]), _usual([one.signed for one in others])
    # The peers count each for themselves: what happens to all of them is no one engine's fault.
    least = max((one.absolute for one in peers), default=0.0)
    return Baseline("history", absolute, signed, len(others), HISTORY_FACTOR, least)


def _usual(values: Sequence[float]) -> tuple[float, float]:
    middle = median(values)
    return middle, _MAD * median(abs(value - middle) for value in values)


def compare(worker_id: int, own: Rates, base: Baseline, rules: AgreementRules) -> SuspectWorker | None:
    """Whether a worker is wrong: by its absolute rate, else by its signed one."""
    floor, ratio = rules.floor * base.factor, rules.ratio * base.factor
    usual, spread = base.absolute
    limit = max(floor, (ratio - 1.0) * usual, rules.ratio * base.least - usual)
    excess = own.absolute - usual
    if found := _beyond(excess, math.hypot(own.absolute_se, spread), limit, rules):
        return SuspectWorker(
            worker_id, "absolute", own, base.against, base.compared, usual, spread, found, limit
        )
    limit = max(floor, SIGNED_SHARE * ratio * max(usual, base.least))
    usual, spread = base.signed
    # d has no good side: what is drawn from q has -KL(q || p), and above 0 lies only what is reported wrongly.
    excess = abs(own.signed - usual) if abs(own.signed) > abs(usual) else 0.0
    if found := _beyond(excess, math.hypot(own.signed_se, spread), limit, rules):
        return SuspectWorker(
            worker_id, "signed", own, base.against, base.compared, usual, spread, found, limit
        )
    return None


def _beyond(excess: float, deviation: float, limit: float, rules: AgreementRules) -> float:
    """The excess in deviations where it is too large by both measures, else 0."""
    z = min(excess / max(deviation, 1e-12), MOST_Z)
    return z if excess > limit and z > rules.z else 0.0
