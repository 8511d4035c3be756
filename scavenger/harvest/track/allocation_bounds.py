"""When an allocation began and ended where no poll saw it: what bounds its times, and what Slurm's accounting says of it later. Pure.

The order of belief, for each end of an allocation:

    slurm       StartTime of the job's present life; EndTime of one that is over; SubmitTime of one that was put back, which is
                when its GPUs were free (sacct -D says the same second, or KillWait sooner where its processes had to be killed)
    worker      the job's engine registered, so that the job ran; it was heard, so that the job still ran
    poll        the job was seen to wait, or to run

Where Slurm's own time is not known any more, the first moment at which the job is *known to have held its GPUs* is recorded as the start
and the last such moment as the end: what is counted was certainly held. An event `allocation_bounded` says how much longer it may have
been, and where the site keeps accounting, `corrected` puts Slurm's own times in their place.

Owns these rules. Knows nothing of commands, nor of the ledger's tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scavenger.cluster.model import JobLife
from scavenger.router.core.events import WorkerLife

#: Slurm counts whole seconds, and our clock is another one: so far apart a life that accounting tells of is still the bounded one.
CLOCKS_S = 5.0
#: Accounting calls a life over when its processes got TERM: KillWait before its GPUs are free.
KILL_S = 60.0
#: Accounting is asked for an allocation this often at most; slurmdbd hears of an end within seconds.
MOST_ASKED = 20


@dataclass(frozen=True, slots=True)
class Bounded:
    """An allocation that is over, and of which Slurm's own times are not known. Each end lies between two moments (Unix s)."""

    intent_id: str
    job_id: int
    restart_count: int
    node: str
    gpus: int
    started_at: float  # as recorded
    ended_at: float
    reason: str
    start: tuple[float, float]
    end: tuple[float, float]
    run_id: int
    intended_at: float

    def holds(self, life: JobLife) -> bool:
        """Whether it may be this life."""
        begins = (
            life.start_time <= 0 or self.start[0] - CLOCKS_S <= life.start_time <= self.start[1] + CLOCKS_S
        )
        return begins and self.end[0] - CLOCKS_S - KILL_S <= life.end_time <= self.end[1] + CLOCKS_S

    @property
    def unknown_s(self) -> float:
        """How much longer it may have been than what is recorded."""
        return (self.started_at - self.start[0]) + (self.end[1] - self.ended_at)

    @property
    def words(self) -> str:
        return (
            f"allocation {self.restart_count} of job {self.job_id} was not seen whole: {self.ended_at - self.started_at:.0f} s are "
            f"recorded, it may have been {self.unknown_s:.0f} s longer"
        )

    @property
    def detail(self) -> str:
        """The event's JSON: each end lies between these two moments (Unix s)."""
        return json.dumps(
            {"job_id": self.job_id, "restart_count": self.restart_count, "start": self.start, "end": self.end}
        )


@dataclass(frozen=True, slots=True)
class Vanished:
    """A job that left the queue unseen: after `last_allocation` it may have had lives of which nothing here tells."""

    intent_id: str
    job_id: int
    last_allocation: int
    gpus: int
    intended_at: float


def between(at: float, low: float, high: float) -> float:
    """Slurm's own time, moved to the nearer of two moments that it lies between by what we saw: its clock need not be ours, and its times
    are whole seconds, so that what happened in the first moment's second is told as before it."""
    return min(max(at, low), high)


def alive(life: WorkerLife | None, low: float, high: float) -> tuple[float, float] | None:
    """From when to when its engine shows that a job held GPUs, within the bounds of this life; None where no engine registered."""
    if life is None:
        return None
    start = min(max(life.joined_at, low), high)
    return start, min(max(life.seen_at, start), high)


def lives_of(name: str, job_id: int, since: float, lives: Iterable[JobLife]) -> tuple[JobLife, ...]:
    """One job's lives that held anything, in order, so that the place of each is its restart count.

    Slurm 22.05 loses the start of a life whose processes had to be killed: it is 0, and its node tells that it ran. A controller that lost
    its state gives ids out again: those of another name, or from before our intent, are other jobs'.
    """
    mine = [
        life
        for life in lives
        if life.job_id == job_id and life.name == name and life.submit_time >= math.floor(since) - CLOCKS_S
    ]
    return tuple(
        sorted((life for life in mine if life.nodes), key=lambda life: (life.submit_time, life.start_time))
    )


def corrected(one: Bounded, lives: Sequence[JobLife]) -> JobLife | None:
    """The life that this allocation was, if accounting knows it by now. `lives`: of `lives_of`.

    By its restart count; where accounting has fewer rows than lives (it was set up later, or purged), by its times, if one alone fits.
    """
    over = [life for life in lives if life.end_time > 0]
    if (
        one.restart_count < len(lives)
        and lives[one.restart_count].end_time > 0
        and one.holds(lives[one.restart_count])
    ):
        return lives[one.restart_count]
    fits = [life for life in over if one.holds(life)]
    return fits[0] if len(fits) == 1 else None


def beyond(one: Vanished, lives: Sequence[JobLife]) -> list[tuple[int, JobLife]] | None:
    """The lives of a vanished job that have no allocation, by restart count; None while accounting does not know of its end."""
    mine = [life for life in lives if life.job_id == one.job_id and life.name == one.intent_id]
    if not mine or any(life.end_time <= 0 for life in mine):
        return None
    held = lives_of(one.intent_id, one.job_id, one.intended_at, mine)
    return [(at, life) for at, life in enumerate(held) if at > one.last_allocation]


def merged(known: Mapping[int, WorkerLife], life: WorkerLife) -> WorkerLife:
    """What is known of a life's engine, with what was heard now: of the same engine, or of one more of that life."""
    before = known.get(life.incarnation, life)
    return replace(
        life,
        joined_at=min(before.joined_at, life.joined_at),
        seen_at=max(before.seen_at, life.seen_at),
        # What it had loaded for one run it forgets for the next.
        ready=life.ready or (before.ready and before.run_id in (0, life.run_id)),
    )
