"""What is known of an open intent and of its allocation, and what an observation of it leads to. Pure; `tracker` and `allocations` fill
it in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scavenger.cluster.model import Job, nodes_in
from scavenger.harvest.decide.actions import DrainKind, HarvestCode
from scavenger.harvest.track.allocation_bounds import Bounded
from scavenger.harvest.track.observed_jobs import Stage
from scavenger.harvest.track.set_up import FailedStart
from scavenger.ledger import records as rec
from scavenger.router.core.events import JobGone, WorkerLife

#: Kinds of jobs, as the ledger calls them; the latter is also who decided about them.
ENGINE, ENVIRONMENT = "engine", "environment"


@dataclass(slots=True)
class Allocation:
    """One incarnation that holds GPUs. `node`: of several nodes all, joined by ","."""

    restart_count: int
    node: str
    started_at: float

    @property
    def nodes(self) -> tuple[str, ...]:
        return nodes_in(self.node)

    def lost(self, nodes: set[str]) -> bool:
        """Whether one of its nodes is among these: the whole engine ends with it."""
        return not nodes.isdisjoint(self.nodes)


@dataclass(slots=True)
class Tracked:
    """One intent that is not closed."""

    intended: rec.JobIntended
    job_id: int = 0
    stage: Stage = Stage.UNKNOWN
    seen: tuple[str, str, str, int] = ("", "", "", 0)  # (state, flags, node, restart count) as last recorded
    job: Job | None = None  # as last listed
    last_state: str = ""
    held: str = ""
    allocation: Allocation | None = None
    last_allocation: int = (
        -1
    )  # the restart count of the newest allocation in the ledger: each is recorded once
    reported: int = -1  # the newest incarnation of which the router knows that it is over
    since: float = 0.0  # when it entered its stage
    held_at: float = 0.0  # the last moment at which it was seen to run
    unseen_since: float | None = None
    unseen: int = 0
    drain_kind: DrainKind = DrainKind.NO
    asked_at: float = 0.0
    why_draining: str = ""
    drain_code: HarvestCode | None = None
    #: The restart count of the newest life that was to be its job's last: it was asked to leave, or finished by itself.
    last_life: int = -1
    returned: str = ""  # why its job was not to come back, where Slurm has put it back all the same
    #: The nodes that it was submitted for, joined by ","; of a restored job for which Slurm chose, the one where it ran.
    pinned: str = ""
    standby: bool = False  # it waits for us to say where it begins
    worked: bool = False  # its engine held leases, of the run that it works for now
    lent_to: str = ""  # the run whose samples its engine computes beside its own run's
    inherited: bool = False  # a daemon before this one submitted it, perhaps for another release
    free_at: float = (
        0.0  # the last moment at which it is known to have held nothing: its next life begins after it
    )
    workers: dict[int, WorkerLife] = field(default_factory=dict)  # engines that registered, by life
    submitted_at: float = 0.0  # when this daemon submitted it, until its engine was ready
    #: Since when it works for its run, and when its engine was asked to go on for it and has not registered yet (0: it was not).
    run_since: float = 0.0
    changing_since: float = 0.0
    switching_since: float = (
        0.0  # when its engine was asked to, until it was ready for the run; 0: not measured
    )
    #: The run that its engine leaves, until it has registered for the new one; 0: none.
    leaves_run: int = 0
    #: For which run its engine is being built anew, until it is ready or its process is gone; 0: for none.
    builds_for: int = 0

    @property
    def intent_id(self) -> str:
        return self.intended.intent_id

    @property
    def blamed_run(self) -> int:
        """Whose doing it is when its engine dies now: no key of the next run is read before the engine has forgotten the last one."""
        return self.leaves_run or self.intended.run_id

    def works_since(self, allocation: Allocation) -> float:
        """Since when the engine of this allocation has worked for the run that `blamed_run` names (Unix s)."""
        return allocation.started_at if self.leaves_run else max(allocation.started_at, self.run_since)


@dataclass(slots=True)
class Draft:
    """What one observation leads to, while it is being written: records, incarnations that are over, and intents that are closed."""

    now: float
    records: list[rec.Record] = field(default_factory=list)
    gone: list[JobGone] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    bounded: list[Bounded] = field(default_factory=list)  # allocations without Slurm's own times
    failed_starts: list[FailedStart] = field(default_factory=list)
    asked_at: float = math.inf  # when the observation was asked for: it is at least as new as this

    @property
    def seen_at(self) -> float:
        """When what the observation shows was so, certainly."""
        return min(self.asked_at, self.now)

    def over(self, one: Tracked, incarnation: int, why: str, crashed: bool) -> None:
        """Tell the router, once, that this incarnation and all before it are over."""
        if incarnation > one.reported:
            one.reported = incarnation
            self.gone.append(JobGone(one.intent_id, incarnation, f"the scheduler says: {why}", crashed))
