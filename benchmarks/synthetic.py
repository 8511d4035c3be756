"""A made-up cluster whose idle GPUs have the statistics of the real trace: what runs where the traces may not be read.

Blocks of GPUs (whole nodes in teams that one job takes together, and fragments of nodes that small jobs take) turn idle and busy by turns.
Idle times come from the trace's own quantiles; busy times give the reclaims an hour. Some nodes stand idle throughout, as there. Owns the
generator's parameters, which no controller may read. Pure: every draw comes from a named stream.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scavenger.errors import ConfigError
from scavenger.simulate.clock import Streams
from scavenger.simulate.fleet import FleetTrace, from_deltas

# (share of a block's idle times that are shorter, seconds). Near the quantiles that the traces' README gives of a GPU's idle slices (0.29
# within 1 min, 0.53 within 5, 0.70 within 15, 0.85 within 1 h, 0.90 within 8,467 s), but longer: on a node with several blocks the latest
# idle GPU is taken first, which makes slices shorter than the blocks' idle times. Tuned once until `measure` gave the README's figures.
IDLE_QUANTILES = (
    (0.0, 10.0),
    (0.25, 60.0),
    (0.47, 300.0),
    (0.66, 900.0),
    (0.835, 3600.0),
    (0.89, 8467.0),
    (1.0, 65_000.0),
)


@dataclass(frozen=True, slots=True)
class Teams:
    """`count` teams of `nodes` whole nodes that jobs of others take together. `busy_s`: mean time that such a job runs."""

    count: int
    nodes: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Fragments:
    """`nodes` nodes whose GPUs small jobs take: on each, blocks of these many GPUs turn idle and busy by themselves."""

    nodes: int
    blocks: tuple[int, ...]
    busy_s: float


@dataclass(frozen=True, slots=True)
class SyntheticSite:
    """Parameters of the generator. `constant_idle`: idle GPUs, a node each, that nobody ever takes. `busy_spread`: of the logarithm.

    `day`: how much faster than the mean everything happens at the busiest hour (and slower at the quietest), from 0 to below 1.
    """

    gpus_per_node: int = 8
    constant_idle: tuple[int, ...] = (8, 8, 8, 8, 8, 6, 4)
    teams: tuple[Teams, ...] = (
        Teams(3, 7, 33_000.0),
        Teams(5, 4, 33_000.0),
        Teams(12, 2, 33_000.0),
        Teams(20, 1, 33_000.0),
    )
    fragments: tuple[Fragments, ...] = (
        Fragments(10, (1, 1, 1, 1, 2, 2), 17_000.0),
        Fragments(5, (1, 1, 2, 4), 1_700.0),
    )
    idle_quantiles: tuple[tuple[float, float], ...] = IDLE_QUANTILES
    busy_spread: float = 1.2
    day: float = 0.8

    def __post_init__(self) -> None:
        sizes = [sum(kind.blocks) for kind in self.fragments] + list(self.constant_idle)
        times = [kind.busy_s for kind in self.teams] + [kind.busy_s for kind in self.fragments]
        if (
            max(sizes, default=0) > self.gpus_per_node
            or min(times, default=1.0) <= 0
            or not 0 <= self.day < 1
        ):
            raise ConfigError(
                f"a site that cannot be: {self}",
                "blocks must fit a node, busy times be above 0, day from 0 to below 1",
            )


EARTH_LIKE = SyntheticSite()

DAY_S = 86_400.0
_WARM_UP_S = 10 * DAY_S  # so that time 0 is an instant like any other


def idle_quantile(share: float, table: Sequence[tuple[float, float]] = IDLE_QUANTILES) -> float:
    """Seconds below which `share` of the idle times end: log-linear between the table's points."""
    for (low, low_s), (high, high_s) in itertools.pairwise(table):
        if share <= high:
            return low_s * math.exp((share - low) / (high - low) * math.log(high_s / low_s))
    return table[-1][1]


def generate(streams: Streams, length_s: float, site: SyntheticSite = EARTH_LIKE) -> FleetTrace:
    """A fleet of `site` over `length_s`; time 0 is midnight. The same seed gives the same fleet; a longer one begins alike."""
    initial = {f"standing-{index:03}": idle for index, idle in enumerate(site.constant_idle)}
    deltas: list[tuple[float, str, int]] = []
    clock = _Clock(length_s, site.day)
    for kind, teams in enumerate(site.teams):
        for index in range(teams.count):
            nodes = [f"whole-{kind}-{index:03}-{node}" for node in range(teams.nodes)]
            times = _idle_times(streams.stream("fleet", nodes[0]), site, teams.busy_s, clock)
            _apply_fragments(times, site.gpus_per_node, nodes, initial, deltas)
    for kind, fragments in enumerate(site.fragments):
        for index in range(fragments.nodes):
            node = f"fragment-{kind}-{index:03}"
            for block, gpus in enumerate(fragments.blocks):
                times = _idle_times(streams.stream("fleet", node, block), site, fragments.busy_s, clock)
                _apply_fragments(times, gpus, [node], initial, deltas)
    # a node's own changes keep their order; between nodes the name decides
    inside = sorted((one for one in deltas if one[0] < length_s), key=lambda item: (item[0], item[1]))
    return from_deltas(
        f"synthetic, seed {streams.seed}",
        length_s,
        dict.fromkeys(initial, site.gpus_per_node),
        initial,
        inside,
    )


def _apply_fragments(
    times: Iterator[tuple[float, float]],
    gpus: int,
    nodes: Sequence[str],
    initial: dict[str, int],
    deltas: list[tuple[float, str, int]],
) -> None:
    """One block's life: `gpus` GPUs of each of `nodes` turn idle and busy together."""
    for node in nodes:
        initial.setdefault(node, 0)
    for start_s, end_s in times:
        for node in nodes:
            if start_s <= 0:
                initial[node] += gpus
            else:
                deltas.append((start_s, node, gpus))
            deltas.append((end_s, node, -gpus))


class _Clock:
    """Maps even time to the clock's: at noon everything happens 1 + day times as fast, at midnight 1 - day times."""

    def __init__(self, length_s: float, day: float) -> None:
        self.end_s = length_s
        self._clock = np.arange(-_WARM_UP_S, length_s + DAY_S, 60.0)
        self._even = self._clock - day * DAY_S / (2 * math.pi) * np.sin(2 * math.pi * self._clock / DAY_S)

    def at(self, even_s: float) -> float:
        # to the tenth of a second, as the trace has it; past the grid's end nobody looks
        return round(float(np.interp(even_s, self._even, self._clock)), 1)


def _idle_times(
    stream: np.random.Generator, site: SyntheticSite, busy_s: float, clock: _Clock
) -> Iterator[tuple[float, float]]:
    """(start, end) of one block's idle times, of those that end after 0 and begin before the fleet's end."""
    spread = site.busy_spread
    now = -_WARM_UP_S
    while True:
        now += busy_s * math.exp(spread * float(stream.standard_normal()) - spread**2 / 2)
        start_s = clock.at(now)
        now += idle_quantile(float(stream.random()), site.idle_quantiles)
        if start_s >= clock.end_s:
            return
        end_s = clock.at(now)
        if end_s > max(start_s, 0.0):
            yield start_s, end_s
