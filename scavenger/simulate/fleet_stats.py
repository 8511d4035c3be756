"""What a fleet is like: idle GPUs, how often and how much others take back, how long a GPU stays idle. Pure.

Definitions, under which `earth_node_idle_72h.csv.gz` gives the figures of its README: a GPU's idle *slice* begins when it becomes idle and
ends when it is taken; on a node the latest to become idle is taken first. Slices that began before the trace or outlast it count in
idle time but not among the ended. A *reclaim* is one negative change of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scavenger.simulate.fleet import FleetTrace

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Slice:
    """One GPU's idle time. `whole`: both its beginning and its end lie in the trace."""

    node: str
    start_s: float
    end_s: float
    whole: bool

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Statistics:
    """`by_idle_on_node`: share of the idle GPU time by how many GPUs idle on the node. Slices: of those that are whole."""

    gpus: int
    idle_mean: float
    idle_p5: float
    idle_p50: float
    idle_p95: float
    idle_max: int
    reclaims_per_h: float
    reclaimed_gpus_per_h: float
    hazard_per_gpu_h: float
    whole_node_share: float
    hourly_p10: float
    hourly_p50: float
    hourly_p90: float
    slice_p50_s: float
    slice_p90_s: float
    slice_mean_s: float
    ended_within: dict[float, float]
    short_share: float
    residual_p50_s: float
    by_idle_on_node: dict[int, float]


def slices(fleet: FleetTrace) -> list[Slice]:
    """Every GPU's idle slices, in order of their end."""
    idle: dict[str, list[tuple[float, bool]]] = {
        node: [(0.0, False)] * count for node, count in fleet.initial.items()
    }
    ended = []
    for change in fleet.changes:
        here = idle[change.node]
        for _ in range(abs(change.delta)):
            if change.delta > 0:
                here.append((change.t_s, True))
            else:
                start_s, whole = here.pop()
                ended.append(Slice(change.node, start_s, change.t_s, whole))
    return ended + [
        Slice(node, start, fleet.end_s, False) for node in sorted(idle) for start, _ in idle[node]
    ]


def idle_time_outlasting(fleet: FleetTrace, cold_start_s: float) -> float:
    """The share of idle GPU time in slices longer than `cold_start_s`: what harvesting could reach at most."""
    lengths = np.array([one.length_s for one in slices(fleet)])
    return float(lengths[lengths > cold_start_s].sum() / lengths.sum()) if lengths.sum() else 0.0


def measure(fleet: FleetTrace) -> Statistics:
    """All statistics of one fleet."""
    levels = list(fleet.levels())
    idle = np.array([level for _, _, level in levels], dtype=float)
    spans = np.array([end - start for start, end, _ in levels])
    taken = [change for change in fleet.changes if change.delta < 0]
    reclaimed = -sum(change.delta for change in taken)
    hours = fleet.end_s / HOUR_S
    hourly = np.zeros(max(1, int(hours)))
    for change in taken:
        hourly[min(len(hourly) - 1, int(change.t_s / HOUR_S))] -= change.delta
    everything = slices(fleet)
    whole = np.array([one.length_s for one in everything if one.whole] or [0.0])
    lengths = np.array([one.length_s for one in everything] or [0.0])
    idle_hours = float(idle @ spans) / HOUR_S
    p5, p50, p95 = (weighted_quantile(idle, spans, share) for share in (0.05, 0.5, 0.95))
    return Statistics(
        gpus=fleet.gpus,
        idle_mean=float(idle @ spans / spans.sum()),
        idle_p5=p5,
        idle_p50=p50,
        idle_p95=p95,
        idle_max=int(idle.max()),
        reclaims_per_h=len(taken) / hours,
        reclaimed_gpus_per_h=reclaimed / hours,
        hazard_per_gpu_h=reclaimed / idle_hours if idle_hours else 0.0,
        whole_node_share=-sum(
            change.delta for change in taken if -change.delta >= fleet.capacity[change.node]
        )
        / max(1, reclaimed),
        hourly_p10=float(np.percentile(hourly, 10)),
        hourly_p50=float(np.percentile(hourly, 50)),
        hourly_p90=float(np.percentile(hourly, 90)),
        slice_p50_s=float(np.percentile(whole, 50)),
        slice_p90_s=float(np.percentile(whole, 90)),
        slice_mean_s=float(whole.mean()),
        ended_within={limit: float((whole < limit).mean()) for limit in (60.0, 300.0, 900.0, 3600.0)},
        short_share=float(lengths[lengths < 900].sum() / max(lengths.sum(), 1e-9)),
        residual_p50_s=_residual(lengths, 0.5),
        by_idle_on_node=_by_idle_on_node(fleet),
    )


def weighted_quantile(values: NDArray[np.float64], weights: NDArray[np.float64], share: float) -> float:
    """The least value at or below which lies `share` of the weight."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][min(len(values) - 1, int(np.searchsorted(reached, share * reached[-1])))])


def _residual(lengths: NDArray[np.float64], share: float) -> float:
    """The `share` quantile of how long a GPU that is taken at a random idle instant stays idle (to the end of the trace at most).

    A slice of length L holds min(L, x) of idle time whose residual is below x; solved for x over the sorted lengths.
    """
    ordered = np.sort(lengths)
    total = ordered.sum()
    if not total:
        return 0.0
    below = np.concatenate([[0.0], np.cumsum(ordered)])
    longer = len(ordered) - np.arange(len(ordered) + 1)
    at = below[:-1] + ordered * longer[:-1]  # idle time with a residual below each length
    index = int(np.searchsorted(at, share * total))
    return float((share * total - below[index]) / longer[index])


def _by_idle_on_node(fleet: FleetTrace) -> dict[int, float]:
    idle = dict(fleet.initial)
    since = dict.fromkeys(idle, 0.0)
    ends: Sequence[tuple[float, str, int]] = [(fleet.end_s, node, 0) for node in fleet.initial]
    time_by_count: dict[int, float] = {}
    for t_s, node, delta in [*((change.t_s, change.node, change.delta) for change in fleet.changes), *ends]:
        time_by_count[idle[node]] = time_by_count.get(idle[node], 0.0) + idle[node] * (t_s - since[node])
        idle[node] += delta
        since[node] = t_s
    total = sum(time_by_count.values()) or 1.0
    return {count: time / total for count, time in sorted(time_by_count.items()) if count}
