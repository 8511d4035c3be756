"""How long completions are: lognormal with correlation inside a group, a cap and a drift; or a file's own lengths. Pure, but for `read`.

Both draw through one Gaussian copula: sample i of a group has z_i = sqrt(rho) g + sqrt(1 - rho) e_i, and its length is the distribution's
quantile at Phi(z_i). `rho` is thus the correlation of log lengths before the cap. Owns the generator's truth, which no controller may read
(drivers hand out lengths one finished sample at a time). A draw depends on seed, step and prompt alone, never on who asked before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scavenger.errors import ConfigError
from scavenger.simulate.clock import Streams
from scavenger.simulate.csvfile import read_csv, rows

_NORMAL = NormalDist()
_MOST_SIGMA = 10.0  # exp(sigma^2 / 2) is in the mean


class Lengths(Protocol):
    """Where completion lengths come from."""

    @property
    def cap(self) -> int: ...

    def group(self, streams: Streams, step: int, prompt: int, samples: int) -> tuple[int, ...]:
        """Lengths in tokens of one prompt's samples at a step, each from 1 to `cap`."""


class CachedLengths:
    """`Lengths` that draw a group once: policies that are compared, and scenarios with one seed, ask for the same ones."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._seed: int | None = None  # one seed's are kept: who plays many plays them one after the other
        self._drawn: dict[tuple[int, int, int], tuple[int, ...]] = {}

    @property
    def cap(self) -> int:
        return self._lengths.cap

    def group(self, streams: Streams, step: int, prompt: int, samples: int) -> tuple[int, ...]:
        if streams.seed != self._seed:
            self._seed, self._drawn = streams.seed, {}
        key = step, prompt, samples
        if key not in self._drawn:
            self._drawn[key] = self._lengths.group(streams, step, prompt, samples)
        return self._drawn[key]


def _scores(
    streams: Streams, step: int, prompt: int, samples: int, correlation: float
) -> NDArray[np.float64]:
    drawn = streams.stream("lengths", step, prompt).standard_normal(samples + 1)
    return np.asarray(math.sqrt(correlation) * drawn[0] + math.sqrt(1 - correlation) * drawn[1:])


def _check(correlation: float, cap: int) -> None:
    if not 0 <= correlation <= 1 or cap < 1:
        raise ConfigError(
            f"completion lengths with correlation {correlation} and cap {cap}",
            "correlation is 0 to 1, the cap at least 1 token",
        )


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(mu + drift * step + sigma * z), rounded, from 1 to `cap`. `drift`: the change of mu a step (0.01: about 1 % longer each)."""

    mu: float
    sigma: float
    cap: int
    correlation: float = 0.0
    drift: float = 0.0

    def __post_init__(self) -> None:
        _check(self.correlation, self.cap)
        if not (0 < self.sigma <= _MOST_SIGMA and math.isfinite(self.mu) and math.isfinite(self.drift)):
            raise ConfigError(
                f"completion lengths with mu {self.mu:g}, sigma {self.sigma:g} and drift {self.drift:g}",
                f"they are finite, and sigma is above 0 and at most {_MOST_SIGMA:g}; 0.4 to 1.2 is usual",
            )

    @classmethod
    def with_capped_share(
        cls, sigma: float, cap: int, share: float, correlation: float = 0.0, drift: float = 0.0
    ) -> Lognormal:
        """The one of which `share` (above 0) reaches the cap: mu = ln cap - sigma * quantile(1 - share)."""
        if not 0 < share < 1:
            raise ConfigError(
                f"a capped share of {share}", "it is above 0 and below 1; for next to none give 0.0001"
            )
        return cls(math.log(cap) - sigma * _NORMAL.inv_cdf(1 - share), sigma, cap, correlation, drift)

    @classmethod
    def with_mean(
        cls, mean: float, sigma: float, cap: int, correlation: float = 0.0, drift: float = 0.0
    ) -> Lognormal:
        """The one whose mean after the cap is `mean` tokens at step 0, found by bisection (the mean grows with mu)."""
        if not 1 < mean < cap:
            raise ConfigError(
                f"a mean of {mean:g} tokens with a cap of {cap}", "the mean lies between 1 and the cap"
            )
        low, high = math.log(mean) - sigma**2, math.log(cap) + 10 * sigma
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, sigma, cap).mean() < mean else (low, middle)
        return cls((low + high) / 2, sigma, cap, correlation, drift)

    def capped_share(self, step: int = 0) -> float:
        """The share of completions that reach the cap (before rounding)."""
        return 1 - _NORMAL.cdf((math.log(self.cap) - self.mu - self.drift * step) / self.sigma)

    def mean(self, step: int = 0) -> float:
        """Mean tokens after the cap: E[min(X, cap)] = e^(mu + sigma^2/2) Phi(d - sigma) + cap (1 - Phi(d)), d the cap's score."""
        mu = self.mu + self.drift * step
        score = (math.log(self.cap) - mu) / self.sigma
        return math.exp(mu + self.sigma**2 / 2) * _NORMAL.cdf(score - self.sigma) + self.cap * (
            1 - _NORMAL.cdf(score)
        )

    def group(self, streams: Streams, step: int, prompt: int, samples: int) -> tuple[int, ...]:
        scores = _scores(streams, step, prompt, samples, self.correlation)
        logs = np.minimum(self.mu + self.drift * step + self.sigma * scores, math.log(self.cap))
        return tuple(max(1, min(self.cap, int(length))) for length in np.rint(np.exp(logs)).tolist())


@dataclass(frozen=True, slots=True)
class Sampled:
    """Lengths of a file, sorted: a completion is the quantile at its score, times `scale`, times e^(drift * step), from 1 to `cap`."""

    tokens: tuple[int, ...]
    cap: int
    correlation: float = 0.0
    scale: float = 1.0
    drift: float = 0.0

    def __post_init__(self) -> None:
        _check(self.correlation, self.cap)
        if not self.tokens or not 0 < self.scale < math.inf:
            raise ConfigError(
                f"{len(self.tokens)} sampled lengths scaled by {self.scale}",
                "give a file with lengths, and a scale above 0",
            )
        object.__setattr__(self, "tokens", tuple(sorted(self.tokens)))

    def group(self, streams: Streams, step: int, prompt: int, samples: int) -> tuple[int, ...]:
        scores = _scores(streams, step, prompt, samples, self.correlation)
        factor = self.scale * math.exp(self.drift * step)
        # one of the file's own values, never one between two of them
        ranks = (
            min(len(self.tokens) - 1, int(_NORMAL.cdf(float(score)) * len(self.tokens))) for score in scores
        )
        return tuple(max(1, min(self.cap, round(self.tokens[rank] * factor))) for rank in ranks)


def parse(lines: Iterable[str], source: str = "") -> tuple[int, ...]:
    """The column `output_tokens` of CSV text. `source` keeps the rows of that source (a column) only.

    Raises `ConfigError` naming the line (from 1) that is wrong, or when nothing is left.
    """
    tokens: list[int] = []
    seen: set[str] = set()
    for row in rows(lines, ("source", "output_tokens") if source else ("output_tokens",)):
        seen.add(row.text("source") if source else "")
        if not source or row.text("source") == source:
            tokens.append(row.whole("output_tokens"))
    if not tokens:
        among = f" of source {source!r}; there are {sorted(seen)}" if source else ""
        raise ConfigError(f"there are no completion lengths{among}", "check the file, and the source's name")
    return tuple(tokens)


def read(path: Path, source: str = "") -> tuple[int, ...]:
    """`parse` of a CSV file, gzipped when its name ends in .gz."""
    return read_csv(path, lambda lines: parse(lines, source))
