"""Policies side by side: what each run of each policy came to, as figures with confidence, a table and a report. Pure.

    Play(policy, seed, ...) -> Played     the driver's side: plays one run over one fleet
    Played of all seeds -> PolicyFigures, table, Report, SpeedUp

Owns the statistics and the prices. Knows nothing of policies: they are names. Every policy is played with the same seeds, so that factors
are taken seed by seed, over the same fleet, cold starts and lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scavenger.errors import ConfigError
from scavenger.simulate.fleet_stats import HOUR_S
from scavenger.simulate.report import Estimate, PolicyMetrics, Series, SimulationReport
from scavenger.simulate.survey.survey import SpeedUp

# Student's t, 97.5 %, for 1 to 30 degrees of freedom (any table of it); beyond, the normal distribution's is 2 % off at most.
_T975 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
_NORMAL975 = 1.960


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars a GPU-hour. The defaults are the ones of the project's goals: on-demand and spot H100."""

    reserved: float = 10.47
    harvested: float = 2.66

    def summary(self) -> str:
        origin = "list prices of an H100, on demand and spot" if self == Prices() else "as given"
        return (
            f"Tokens are those of trained completions; per dollar at ${self.reserved:g} a reserved and "
            f"${self.harvested:g} a harvested GPU-hour ({origin}), "
            "start-ups and idle engines paid."
        )


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """One policy's run with one seed, from the first step's start to the last one's end.

    `harvested_gpu_s`: from each engine's start to its end, whatever it did. `step_parts`: (what, seconds) summed over all steps.
    `starts` of engines, of which `wasted` were gone before they made a token; `preemptions`: engines that others took.
    """

    policy: str
    seed: int
    steps: int
    seconds: float
    tokens: int
    reserved_gpu_s: float
    harvested_gpu_s: float
    step_parts: tuple[tuple[str, float], ...] = ()
    starts: int = 0
    wasted: int = 0
    preemptions: int = 0
    moves: int = 0
    regenerated_tokens: int = 0
    owners: Series | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def tokens_per_dollar(self, prices: Prices) -> float:
        return (
            self.tokens
            * HOUR_S
            / (self.reserved_gpu_s * prices.reserved + self.harvested_gpu_s * prices.harvested)
        )


#: The driver's side: (policy, seed, progress) -> what it came to. It tells `progress` the share that is done, from 0 to 1.
RunPolicy = Callable[[str, int, Callable[[float], None]], SimulationResult]


def t975(freedom: int) -> float:
    """Student's t of a two-sided 95 % interval, by degrees of freedom."""
    return _T975[freedom - 1] if freedom <= len(_T975) else _NORMAL975


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and its 95 % confidence interval by Student's t; of one value the value alone."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Estimate(mean, mean, mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = t975(len(values) - 1) * math.sqrt(variance / len(values))
    return Estimate(mean, mean - half, mean + half)


def by_policy(results: Iterable[SimulationResult]) -> dict[str, list[SimulationResult]]:
    """The runs of each policy by seed, in the order in which policies first appear. Raises `ConfigError` unless all have the same seeds."""
    found: dict[str, list[SimulationResult]] = {}
    for one in results:
        found.setdefault(one.policy, []).append(one)
    for runs in found.values():
        runs.sort(key=lambda one: one.seed)
    seeds = {policy: tuple(one.seed for one in runs) for policy, runs in found.items()}
    if len(set(seeds.values())) > 1:
        raise ConfigError(
            f"policies were played with different seeds: {seeds}", "play all of them with the same"
        )
    return found


def policy_metrics(results: Iterable[SimulationResult], prices: Prices) -> tuple[PolicyMetrics, ...]:
    """Each policy's figures over its seeds."""
    return tuple(
        PolicyMetrics(
            policy,
            estimate([one.tokens_per_s for one in runs]),
            _parts(runs),
            estimate([one.tokens_per_dollar(prices) for one in runs]),
            _note(runs),
        )
        for policy, runs in by_policy(results).items()
    )


def _parts(runs: Sequence[SimulationResult]) -> tuple[tuple[str, float], ...]:
    """Mean seconds a step of each part, over all steps of all seeds."""
    names = dict.fromkeys(name for one in runs for name, _ in one.step_parts)
    steps = sum(one.steps for one in runs)
    return tuple(
        (name, math.fsum(value for one in runs for part, value in one.step_parts if part == name) / steps)
        for name in names
    )


def _note(runs: Sequence[SimulationResult]) -> str:
    starts, wasted = sum(one.starts for one in runs), sum(one.wasted for one in runs)
    if not starts:
        return "no engine was harvested"
    hours = math.fsum(one.seconds for one in runs) / HOUR_S
    parts = [
        f"{starts / len(runs):.1f} engine starts, {wasted / starts:.0%} in vain",
        f"{sum(one.preemptions for one in runs) / hours:.1f} preemptions an hour",
        f"{sum(one.moves for one in runs) / len(runs):.0f} samples moved",
    ]
    return ", ".join(parts)


def speed_up(results: Iterable[SimulationResult], policy: str, alone: str, setting: str) -> SpeedUp:
    """How much faster `policy` is than `alone`, seed by seed. Raises `ConfigError` when one of them was not played."""
    runs = by_policy(results)
    missing = [name for name in (policy, alone) if name not in runs]
    if missing:
        raise ConfigError(f"{missing[0]} was not played", f"there are {', '.join(runs)}")
    factor = estimate(
        [one.tokens_per_s / other.tokens_per_s for one, other in zip(runs[policy], runs[alone], strict=True)]
    )
    base, gain = (estimate([one.tokens_per_s for one in runs[name]]).value for name in (alone, policy))
    return SpeedUp(factor.value, factor.low, factor.high, base, gain, setting)


def table(
    results: Iterable[SimulationResult], prices: Prices
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """(columns, rows) for a terminal. Factors are to the first policy, seed by seed. Each policy's note is in its figures."""
    runs = by_policy(results)
    found = policy_metrics((one for policy in runs.values() for one in policy), prices)
    columns = (
        "policy",
        "tokens/s",
        "95 % CI",
        f"x {found[0].name}" if found else "x",
        "tokens/$",
        "s a step",
    )
    first = next(iter(runs), "")
    rows = []
    for policy in found:
        pairs = zip(runs[policy.name], runs[first], strict=True)
        factor = estimate([one.tokens_per_s / other.tokens_per_s for one, other in pairs])
        speed, dollars = policy.tokens_per_s, policy.tokens_per_dollar
        spread = f"{speed.low:,.0f} - {speed.high:,.0f}" if speed.high > speed.low else "one seed"
        step_s = math.fsum(one.seconds for one in runs[policy.name]) / sum(
            one.steps for one in runs[policy.name]
        )
        rows.append(
            (
                policy.name,
                f"{speed.value:,.0f}",
                spread,
                _factor(factor),
                f"{dollars.value:,.0f}" if dollars else "",
                f"{step_s:.0f}",
            )
        )
    return columns, tuple(rows)


def verdict(results: Iterable[SimulationResult]) -> tuple[str, ...]:
    """Which policies cannot be told from the fastest, and what the intervals do not cover."""
    runs = by_policy(results)
    if len(runs) < 2:
        return ()
    best = max(runs, key=lambda name: estimate([one.tokens_per_s for one in runs[name]]).value)
    if len(runs[best]) < 2:
        return ("one seed tells nothing of chance: use --seeds 3 or more",)
    alike = [name for name in runs if name != best and _alike(runs[best], runs[name])]
    covered = "the 95 % intervals are over completion lengths and cold starts, not over when the run begins: try others (--from)"
    if not alike:
        return (f"{best} is the fastest here, beyond chance", covered)
    return (
        f"{best} cannot be told from {', '.join(alike)} by {len(runs[best])} seeds: use more (--seeds)",
        covered,
    )


def _alike(runs: Sequence[SimulationResult], against: Sequence[SimulationResult]) -> bool:
    factor = estimate(
        [one.tokens_per_s / other.tokens_per_s for one, other in zip(runs, against, strict=True)]
    )
    return factor.low <= 1.0 <= factor.high


def span(results: Sequence[SimulationResult], steps: int, cold_start_s: float) -> tuple[str, ...]:
    """How much was played, and whether it was enough: `steps` were asked for, and an engine works after `cold_start_s`."""
    fewest, most = min(one.steps for one in results), max(one.steps for one in results)
    shortest_s, longest_s = min(one.seconds for one in results), max(one.seconds for one in results)
    done = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    notes = [f"each run took {done} steps, in {shortest_s / 60:.1f} to {longest_s / 60:.1f} min"]
    if fewest < steps:
        notes.append(f"the trace ended before {steps} steps: begin earlier (--from), or take a longer one")
    if shortest_s < 10 * cold_start_s:
        notes.append(
            f"short against an engine's cold start of {cold_start_s:.0f} s: engines matter more in longer runs (--steps)"
        )
    return tuple(notes)


def _own(series: Series) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """What the run has: on a large cluster it would be a thin line among others' GPUs."""
    return tuple((owner, values) for owner, values in series.by_owner if owner in ("reserved", "harvested"))


def _factor(found: Estimate) -> str:
    return (
        f"{found.value:.2f} ± {found.high - found.value:.2f}"
        if found.high > found.low
        else f"{found.value:.2f}"
    )


def report(
    results: Sequence[SimulationResult],
    prices: Prices,
    subtitle: str,
    facts: Sequence[tuple[str, str, str]] = (),
    notes: Sequence[str] = (),
) -> SimulationReport:
    """The page: each policy's figures, and of its first seed the run's own GPUs; of the policy that harvested most all GPUs by owner."""
    runs = by_policy(results)
    first = {
        policy: (one.harvested_gpu_s, one.owners)
        for policy, (one, *_) in runs.items()
        if one.owners is not None
    }
    owners = [
        Series(f"{policy}, the run's own", one.times_s, _own(one), one.end_s)
        for policy, (_, one) in first.items()
    ]
    if first:
        most = max(first, key=lambda policy: first[policy][0])
        owners.append(replace(first[most][1], name=f"{most}, all"))
    return SimulationReport(
        "policies compared",
        subtitle,
        tuple(facts),
        tuple(owners),
        (),
        policy_metrics(results, prices),
        prices.summary(),
        tuple(notes),
    )
