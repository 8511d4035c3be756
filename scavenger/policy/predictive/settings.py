"""Which of the predictive policy's controllers act, and their free parameters. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from scavenger.policy import fleet_size


@dataclass(frozen=True, slots=True)
class PredictiveSettings:
    """Which controllers act, and their free parameters. `limits`: fewer samples at a time than fit. `every_s`: between rebalancings.

    `plateau`: the share of an engine's best throughput up to which it is filled. `margin`: `migration.Price.margin`. `least_saving`: what
    an engine must shorten a step by, at least. `price`: of a harvested GPU-second, in the run's own (`fleet_size.worth`).
    """

    window: bool = True
    placement: bool = True
    limits: bool = True
    rebalance: bool = True
    tails: bool = True
    fleet: bool = True
    every_s: float = 20.0
    plateau: float = 0.97
    margin: float = 0.1
    least_saving: float = 0.003
    price: float = 1.0
    rules: fleet_size.FleetSizeRules = field(default_factory=fleet_size.FleetSizeRules)
