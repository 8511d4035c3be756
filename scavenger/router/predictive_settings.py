"""Which of the predictive policy's controllers act, and their free parameters. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from scavenger.harvest import autoscale


@dataclass(frozen=True, slots=True)
class Settings:
    """Which controllers act, and their free parameters. `limits`: fewer samples at a time than fit. `every_s`: between rebalancings.

    `reopen`: the window, within a step. `probes`: one sample of each group first. `feed`: groups that are nearly whole go first as much as
    the trainer starves.
    `plateau`: the share of an engine's best throughput up to which it is filled. `margin`: `offload.Price.margin`. `least_saving`: what
    an engine must shorten a step by, at least. `price`: of a harvested GPU-second, in the run's own (`autoscale.worth`).
    """

    window: bool = True
    reopen: bool = True
    placement: bool = True
    probes: bool = True
    feed: bool = True
    limits: bool = True
    rebalance: bool = True
    bounds: bool = True
    tails: bool = True
    fleet: bool = True
    every_s: float = 20.0
    plateau: float = 0.97
    margin: float = 0.1
    least_saving: float = 0.003
    price: float = 1.0
    rules: autoscale.Rules = field(default_factory=autoscale.Rules)
