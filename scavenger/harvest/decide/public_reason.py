"""A decision's reason for all users of the site: the words of `scavenger status` less the names of runs, owners, jobs and nodes.

Boundary: what of a decision leaves the circle of the daemon's user; whoever adds a code decides here what all may read of it.

Owns which reasons hold no name and may be told as they are, and the words for the others. Pure; knows no cluster. An admin's own words
(a blackout's, a stop's) count as names: who wrote them wrote them for the admin.
"""

from __future__ import annotations

from collections.abc import Mapping

from scavenger.harvest.decide.actions import HarvestCode

#: Told as they are: made of the site's limits, counts and the partition alone.
NAMELESS = frozenset(
    {
        HarvestCode.STALE_VIEW,
        HarvestCode.PARTITION_DOWN,
        HarvestCode.MAX_ENGINES,
        HarvestCode.MAX_GPUS,
        HarvestCode.MAX_PENDING,
        HarvestCode.MAX_PER_USER,
        HarvestCode.PREEMPTIONS,
    }
)

#: Of every other code with which a decision says why no more engines begin.
WORDS: Mapping[HarvestCode, str] = {
    HarvestCode.NO_RUN: "no run is open",
    HarvestCode.NO_DEMAND: "no open run wants an engine",
    HarvestCode.NOT_ENCRYPTED: "no run that wants an engine encrypts its weights, which one on this cluster needs",
    HarvestCode.SERVED: "every wanted engine runs",
    HarvestCode.OWN_PENDING: "jobs of the daemon's wait to take what is idle",
    HarvestCode.BACKOFF: "submits nothing for a while, as something failed or was refused",
    HarvestCode.MAX_PER_OWNER: "an owner's limit is reached (owners.max_gpus)",
    HarvestCode.ACCOUNT_LIMIT: "Slurm holds a job of the daemon's back: a limit of its QOS, account or user",
    HarvestCode.OTHER_USERS_PENDING: "what is idle is kept for other users' pending jobs",
    HarvestCode.HEADROOM: "what is idle is kept as headroom (harvest.headroom_gpus)",
    HarvestCode.QUARANTINE: "what is idle is on nodes that are quarantined or drained",
    HarvestCode.PLANNED: "what is idle is kept for other users' jobs that are expected soon",
    HarvestCode.RESERVED: "what is idle is reserved soon",
    HarvestCode.PER_NODE: "what is idle is on nodes that have max_gpus_per_node",
    HarvestCode.PER_PARTITION: "a limit of a partition or a GPU type is reached",
    HarvestCode.PER_OWNER_NODES: "what is idle is on nodes that the runs' owners may not use",
    HarvestCode.BLACKOUT: "a blackout is on, or so near that no engine would live for long enough",
    HarvestCode.SETTLING: "what is idle has not been so for long enough to be worth a start",
    HarvestCode.NO_CAPACITY: "no free capacity for more",
    HarvestCode.HIDDEN: "the daemon may not see other users' jobs (PrivateData), so nothing is harvested",
    HarvestCode.STOPPED: "harvesting is stopped",
}


def public_reason(code: HarvestCode, why: str) -> str:
    """Why no more engines begin, as every user may read it. `why`: as the decision's own reason has it, with names."""
    return why if code in NAMELESS else WORDS.get(code, code.replace("_", " "))
