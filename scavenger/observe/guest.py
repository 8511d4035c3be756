"""What the harvester holds, waits for and last saw, as one struct for `scavenger status`. Looks on the event loop; changes nothing.

Owns where each figure comes from; the words are `observe.status`'s.
"""

from __future__ import annotations

from scavenger.harvest.actions import Leaving
from scavenger.harvest.driver import Harvester
from scavenger.harvest.room import owners
from scavenger.observe.status import Harvest


def take(harvester: Harvester | None, now: float) -> Harvest | None:
    """None where the daemon harvests nothing (`harvest.enabled = false`)."""
    if harvester is None:
        return None
    partition, view, standing = harvester.config.harvest.partition, harvester.view, harvester.standing
    jobs = harvester.tracker.jobs({})
    holding = [job for job in jobs if not job.waits]
    seen = owners(view, partition, harvester.tracker.job_ids(), now) if view is not None else None
    return Harvest(
        partition,
        engines=len(holding),
        gpus=sum(job.gpus for job in holding),
        waiting=sum(job.waits and not job.spare for job in jobs),
        spares=sum(job.spare for job in jobs),
        leaving=sum(job.leaving is not Leaving.NO for job in jobs),
        seen_at=view.observed_at if view is not None else 0.0,
        idle=seen.idle if seen is not None else 0,
        others=seen.others if seen is not None else 0,
        pending_others=seen.pending_others if seen is not None else 0,
        stopped=standing.seen.reason if standing.seen is not None else "",
        concluded=standing.concluded,
    )
