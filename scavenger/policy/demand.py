"""How many harvested engines a run could use now, and why: what the harvester reads of a run. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from scavenger.policy.fleet_size import Benefit


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run could use now: `engines` harvested ones, of `gpus_per_engine` each. `reason` explains the number.

    `engine`: the run's `engine.name`, which a job imports while it waits for the daemon's answer. `benefit`: what one more engine is worth,
    where the run's policy says so; None: nothing is known, and what is idle is taken.
    """

    run_id: int
    run: str
    engines: int
    gpus_per_engine: int
    reason: str
    engine: str = "reference"
    benefit: Benefit | None = None
