"""What is known of an open intent and of its hold, and what an observation of it leads to. Pure; `tracker` and `holds` fill it in."""

from __future__ import annotations

from dataclasses import dataclass, field

from scavenger.cluster.model import Job
from scavenger.harvest.actions import Code, Leaving
from scavenger.harvest.sights import Stage
from scavenger.ledger import records as rec
from scavenger.router.events import JobGone


@dataclass(slots=True)
class Hold:
    """One incarnation that holds GPUs."""

    restart_count: int
    node: str
    started_at: float


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
    hold: Hold | None = None
    last_hold: int = -1  # the restart count of the newest hold in the ledger: each is recorded once
    told: int = -1  # the newest incarnation of which the router knows that it is over
    since: float = 0.0  # when it entered its stage
    known_at: float = 0.0  # when the present stage was last confirmed
    unseen_since: float | None = None
    unseen: int = 0
    leaving: Leaving = Leaving.NO
    asked_at: float = 0.0
    why_leaving: str = ""
    code_leaving: Code | None = None
    pinned: str = ""  # the node that it was submitted for; of an older ledger's job the one where it ran, if it did
    spare: bool = False  # it waits for us to say where it begins
    worked: bool = False  # its engine held leases
    inherited: bool = False  # a daemon before this one submitted it, perhaps for another release

    @property
    def intent_id(self) -> str:
        return self.intended.intent_id


@dataclass(slots=True)
class Draft:
    """What one observation leads to, while it is being written: records, incarnations that are over, and intents that are closed."""

    now: float
    records: list[rec.Record] = field(default_factory=list)
    gone: list[JobGone] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def over(self, one: Tracked, incarnation: int, why: str, crashed: bool) -> None:
        """Tell the router, once, that this incarnation and all before it are over."""
        if incarnation > one.told:
            one.told = incarnation
            self.gone.append(JobGone(one.intent_id, incarnation, f"the scheduler says: {why}", crashed))
