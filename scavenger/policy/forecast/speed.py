"""What engines and the trainer cost in seconds, learned from what was seen of them. Pure.

    decode step   a + b * batch + c * context tokens     by least squares of the relative error, none of a, b, c negative
    prefill       p * tokens, p = PREFILL_SHARE * a: not measured of itself
    training      seconds a round + seconds a token        by the same of whole steps, neither negative

The decode line makes an engine's work additive: with nothing joining, a set of samples with h tokens and r to come drains in

    a * max(r) + sum of (b * r + c * (h * r + r^2 / 2))

which is what placement, offload and the window reckon with. Priors are stated beside each learner. Knows nothing of leases and time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

#: Before any engine was seen: an 8B model in bf16 on an H100-like GPU. Only ratios matter much, since the first measurement scales all.
PRIOR_STEP = (7e-3, 2e-5, 6e-8)
#: Prefill of a token, in decode steps of one sequence. Both pass all P weights: one takes 2 P FLOP, the other 2 P bytes (bf16) and what
#: no batch changes. On an H100 an 8B model's step was measured at 7.0 ms (`simulate.presets.VLLM_H100_STEPS`), and its prefill takes
#: 2 * 8.2e9 / (0.55 * 989e12) = 3.0e-5 s a token at 55 % of the data sheet's rate. (Bandwidth over rate alone, with nothing else in a
#: step, would be half as much again; two GPUs an engine, where what does not shrink weighs more, a tenth less.)
PREFILL_SHARE = 0.004
_SCALE = (1.0, 1 / 64, 1 / 65_536)  # of the columns (1, batch, context)


@dataclass(frozen=True, slots=True)
class SpeedCurve:
    """Seconds of a decode step: `base + per_sample * batch + per_token * context`, context over all sequences of the batch."""

    base: float
    per_sample: float
    per_token: float

    def step_s(self, batch: float, context: float) -> float:
        return self.base + self.per_sample * batch + self.per_token * context

    def tokens_per_s(self, batch: float, each: float) -> float:
        """Throughput of `batch` sequences of `each` tokens: concave in the batch, with a plateau at 1 / (per_sample + per_token * each)."""
        return batch / self.step_s(batch, batch * each)

    def work_s(self, have: float, rest: float) -> float:
        """What a sample adds to its engine's time, besides `base` for each step that there would not have been without it."""
        return self.per_sample * rest + self.per_token * rest * (have + rest / 2)

    def works_s(self, samples: Sequence[tuple[float, float]]) -> float:
        """`work_s` of all (tokens, tokens to come), added up in their order: written out, every look asks it of every sample."""
        sample_s, token_s = self.per_sample, self.per_token
        return sum([sample_s * rest + token_s * rest * (have + rest / 2) for have, rest in samples])

    def drain_s(self, samples: Sequence[tuple[float, float]]) -> float:
        """Seconds until an engine that holds these (tokens, tokens to come) is done, when nothing joins."""
        return self.base * max([rest for _, rest in samples], default=0.0) + self.works_s(samples)

    def plateau(self, each: float, share: float = 0.9) -> int:
        """The batch that reaches `share` of the throughput that no batch exceeds, at least 1."""
        load = self.per_sample + self.per_token * each
        if load <= 0:
            return 1 << 20
        return max(1, min(1 << 20, int(self.base * share / (1 - share) / load) + 1))


class CurveFit:
    """Learns one kind of engine's line. A prior line (scaled to the first measurements) stands for what they do not tell."""

    #: Weight of the prior on each coefficient, in measurements; and how much a measurement counts after the next.
    PRIOR = 0.02
    KEEP = 0.995
    #: A step that is so many times shorter than those before, batch and context considered, is not one of this kind of engine: as weights
    #: grow with the square of the pace, a single wrong one would outweigh thousands. Many in a row move the mean, and then count.
    MOST_FASTER = 20.0
    LEAST_SEEN = 20

    def __init__(self) -> None:
        self._gram = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._scale_sum = self._weight = 0.0
        self._log_sum = self._log_weight = 0.0  # of all that was measured
        self.seen = 0

    def observe(self, batch: float, context: float, step_s: float) -> None:
        """One measurement: the mean seconds of a step with this batch and context."""
        if batch <= 0 or step_s <= 0 or context < 0:
            raise ValueError(f"a decode step of {step_s} s with {batch} sequences and {context} tokens")
        scale = step_s / SpeedCurve(*PRIOR_STEP).step_s(batch, context)
        if self._too_fast(scale):
            return
        row = [_SCALE[0] / step_s, _SCALE[1] * batch / step_s, _SCALE[2] * context / step_s]
        for i in range(3):
            self._right[i] = self.KEEP * self._right[i] + row[i]
            for j in range(3):
                self._gram[i][j] = self.KEEP * self._gram[i][j] + row[i] * row[j]
        self._scale_sum = self.KEEP * self._scale_sum + scale
        self._weight = self.KEEP * self._weight + 1.0
        self.seen += 1

    def _too_fast(self, scale: float) -> bool:
        mean = self._log_sum / self._log_weight if self.seen >= self.LEAST_SEEN else -math.inf
        self._log_sum = self.KEEP * self._log_sum + math.log(scale)
        self._log_weight = self.KEEP * self._log_weight + 1.0
        return math.log(scale) < mean - math.log(self.MOST_FASTER)

    def curve(self, prior: SpeedCurve | None = None) -> SpeedCurve:
        """The line that fits best. `prior`: of another kind of engine, for what was not measured on this one."""
        if not self.seen:
            return prior or SpeedCurve(*PRIOR_STEP)
        if prior is None:
            factor = self._scale_sum / self._weight
            prior = SpeedCurve(*(factor * value for value in PRIOR_STEP))
        centre = [prior.base / _SCALE[0], prior.per_sample / _SCALE[1], prior.per_token / _SCALE[2]]
        typical = max(prior.step_s(64, 65_536), 1e-12)
        ridge = [self.PRIOR / max(value, 1e-3 * typical) ** 2 for value in centre]
        gram = [[self._gram[i][j] + (ridge[i] if i == j else 0.0) for j in range(3)] for i in range(3)]
        right = [self._right[i] + ridge[i] * centre[i] for i in range(3)]
        found = _least_squares(gram, right)
        return SpeedCurve(max(found[0] * _SCALE[0], 1e-9), found[1] * _SCALE[1], found[2] * _SCALE[2])


def _least_squares(gram: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The nonnegative minimiser of x' G x - 2 r' x: the best of the solutions with some coefficients held at 0 (three: eight cases)."""
    best, least = [0.0] * len(right), 0.0
    for size in range(len(right), 0, -1):
        for free in combinations(range(len(right)), size):
            part = _solve([[gram[i][j] for j in free] for i in free], [right[i] for i in free])
            if part is None or min(part) < 0:
                continue
            value = -sum(
                x * right[i] for x, i in zip(part, free, strict=True)
            )  # the minimum over the free ones
            if value < least:
                best, least = [0.0] * len(right), value
                for x, i in zip(part, free, strict=True):
                    best[i] = x
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None when the matrix is singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        if abs(rows[pivot][i]) < 1e-300:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found


class Curves:
    """The line of each kind of engine, by its name. A kind that was not seen yet is like all others together."""

    #: A kind's own line is solved again after this share of new measurements.
    FRESH = 0.05

    def __init__(self) -> None:
        self._all = CurveFit()
        self._kinds: dict[str, CurveFit] = {}
        self._cached: dict[str, tuple[int, int, SpeedCurve]] = {}

    def observe(self, kind: str, batch: float, context: float, step_s: float) -> None:
        self._all.observe(batch, context, step_s)
        self._kinds.setdefault(kind, CurveFit()).observe(batch, context, step_s)

    def seen(self, kind: str) -> int:
        fit = self._kinds.get(kind)
        return fit.seen if fit else 0

    def curve(self, kind: str) -> SpeedCurve:
        own, everything = self.seen(kind), self._all.seen
        cached = self._cached.get(kind)
        if (
            cached
            and own < cached[0] * (1 + self.FRESH) + 1
            and (own or everything < cached[1] * (1 + self.FRESH) + 1)
        ):
            return cached[2]
        curve = self._all.curve()
        if kind in self._kinds and len(self._kinds) > 1:
            curve = self._kinds[kind].curve(prior=curve)
        self._cached[kind] = (own, everything, curve)
        return curve


class Average:
    """A duration's exponential average, that starts at a prior worth `strength` measurements and remembers about `memory` of them.

    A prior says what a mid-size model takes: it is for the time before the first measurement, and hardly weighs after it. Worth one whole
    measurement, ten seconds of it would outlast ten steps of a run whose steps take two.
    """

    def __init__(self, prior: float, strength: float = 0.02, memory: float = 20.0) -> None:
        self._sum, self._weight, self._keep = prior * strength, strength, 1 - 1 / memory
        self.seen = 0

    def observe(self, value: float) -> None:
        if value < 0:
            raise ValueError(f"a duration of {value} s")
        self._sum = self._keep * self._sum + value
        self._weight = self._keep * self._weight + 1.0
        self.seen += 1

    @property
    def value(self) -> float:
        return self._sum / self._weight


class Ratio:
    """Seconds a unit, as the ratio of sums; starts at a prior worth `strength` units of work."""

    def __init__(self, prior: float, strength: float, memory: float = 50.0) -> None:
        self._prior, self._strength, self._keep = prior, strength, 1 - 1 / memory
        self._seconds = self._units = 0.0
        self.seen = 0

    def observe(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds < 0:
            raise ValueError(f"{units} units in {seconds} s")
        self._seconds = self._keep * self._seconds + seconds
        self._units = self._keep * self._units + units
        self.seen += 1

    def value(self, prior: float | None = None) -> float:
        prior = self._prior if prior is None else prior
        return (self._seconds + prior * self._strength) / (self._units + self._strength)


class RoundFit:
    """A step's training as seconds a round and seconds a token, by least squares of the relative error, neither negative.

    Steps that differ in tokens a round tell the two apart. What they do not tell goes to the tokens: a prior of so many steps holds that
    rounds cost nothing of themselves.
    """

    #: Best where a step's seconds scatter by 2 % and rounds may be a third of them: the square of one over the other.
    PRIOR = 0.005
    KEEP = 0.98

    def __init__(self) -> None:
        self._gram = [[0.0, 0.0], [0.0, 0.0]]
        self._right = [0.0, 0.0]
        self._weight = self._per_round = self._per_token = (
            0.0  # means of a round's and of a token's share of a step's seconds, summed
        )
        self.seen = 0

    def observe(self, rounds: float, tokens: float, seconds: float) -> None:
        """One step: so many rounds over so many tokens took so long."""
        if rounds <= 0 or tokens <= 0 or seconds <= 0:
            raise ValueError(f"{rounds} rounds over {tokens} tokens in {seconds} s")
        row = (rounds / seconds, tokens / seconds)
        for i in range(2):
            self._right[i] = self.KEEP * self._right[i] + row[i]
            for j in range(2):
                self._gram[i][j] = self.KEEP * self._gram[i][j] + row[i] * row[j]
        self._weight = self.KEEP * self._weight + 1.0
        self._per_round = self.KEEP * self._per_round + row[0]
        self._per_token = self.KEEP * self._per_token + row[1]
        self.seen += 1

    def costs(self) -> tuple[float, float] | None:
        """(seconds a round, seconds a token); None before the first step."""
        if not self.seen:
            return None
        # In shares of a step's seconds, so that both unknowns are near 1 at most: a round's prior is 0 of it, the tokens' all of it.
        unit = (self._weight / self._per_round, self._weight / self._per_token)
        gram = [
            [self._gram[i][j] * unit[i] * unit[j] + (self.PRIOR if i == j else 0.0) for j in range(2)]
            for i in range(2)
        ]
        found = _least_squares(gram, [self._right[0] * unit[0], self._right[1] * unit[1] + self.PRIOR])
        return found[0] * unit[0], found[1] * unit[1]
