"""What one poll of the queue says about one job of ours, as tables. Pure.

Slurm's states are not ends: PREEMPTED and NODE_FAIL jobs come back under the same id, COMPLETING ones still have GPUs, one that is not
listed may be listed again. `observed_state_of` reads a job's state, `NEXT` says what it means for an intent
in each stage, and `END_REASONS` how the ledger calls an allocation that ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from scavenger.cluster.model import Job, JobFlag, JobState
from scavenger.errors import ScavengerError
from scavenger.harvest.decide.actions import INTENT


class Stage(StrEnum):
    """Where a job intent is in its life."""

    UNKNOWN = "unknown"  # intended; not known whether Slurm has it
    WAITING = "waiting"  # in the queue, has no GPU
    ALLOCATED = "allocated"  # has GPUs
    COMPLETING = "completing"  # its processes are going, the GPUs are not free yet
    RETURNING = "returning"  # PREEMPTED or lost its node, and on its way back to PENDING
    MISSING = "missing"  # was in the queue and is not listed
    OVER = "over"  # Slurm says that it ended
    ENDED = "ended"  # closed in the ledger


class ObservedState(StrEnum):
    """What one observation shows."""

    WAITS = "waits"
    ALLOCATED = "allocated"
    COMPLETES = "completes"
    RETURNS = "returns"
    FINISHED = "finished"
    ABSENT = "absent"


_STAGE_OF = {
    ObservedState.WAITS: Stage.WAITING,
    ObservedState.ALLOCATED: Stage.ALLOCATED,
    ObservedState.COMPLETES: Stage.COMPLETING,
    ObservedState.RETURNS: Stage.RETURNING,
    ObservedState.FINISHED: Stage.OVER,
}
_ABSENT_FROM = {
    Stage.UNKNOWN: Stage.UNKNOWN,
    Stage.WAITING: Stage.MISSING,
    Stage.ALLOCATED: Stage.MISSING,
    Stage.COMPLETING: Stage.MISSING,
    Stage.RETURNING: Stage.MISSING,
    Stage.MISSING: Stage.MISSING,
    Stage.OVER: Stage.OVER,  # a finished job that is no longer listed is still finished
}

#: (stage, observed state) -> stage. Any living stage can follow any other between two polls; nothing follows ENDED.
NEXT: dict[tuple[Stage, ObservedState], Stage] = {
    **{(stage, observed): target for stage in _ABSENT_FROM for observed, target in _STAGE_OF.items()},
    **{(stage, ObservedState.ABSENT): target for stage, target in _ABSENT_FROM.items()},
}

#: Stages in which the clock of `absent_s` runs: unless the job is seen alive before it has run out, the intent is closed.
UNSEEN = frozenset({Stage.UNKNOWN, Stage.MISSING, Stage.RETURNING, Stage.OVER})

_OBSERVED_STATE_OF: Mapping[JobState, ObservedState] = {
    JobState.PENDING: ObservedState.WAITS,
    JobState.RUNNING: ObservedState.ALLOCATED,
    JobState.SUSPENDED: ObservedState.ALLOCATED,
    JobState.PREEMPTED: ObservedState.RETURNS,
    JobState.NODE_FAIL: ObservedState.RETURNS,
    JobState.BOOT_FAIL: ObservedState.RETURNS,
    JobState.COMPLETED: ObservedState.FINISHED,
    JobState.CANCELLED: ObservedState.FINISHED,
    JobState.FAILED: ObservedState.FINISHED,
    JobState.TIMEOUT: ObservedState.FINISHED,
    JobState.DEADLINE: ObservedState.FINISHED,
    JobState.OUT_OF_MEMORY: ObservedState.FINISHED,
}

#: Why an allocation ended, by the state that the job is in then (`records.AllocationEnded`). PENDING and RUNNING: see `Tracker`.
END_REASONS: Mapping[JobState, str] = {
    JobState.PREEMPTED: "preempted",
    JobState.NODE_FAIL: "node_fail",
    JobState.BOOT_FAIL: "node_fail",
    JobState.COMPLETED: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.FAILED: "failed",
    JobState.OUT_OF_MEMORY: "failed",
    JobState.TIMEOUT: "timeout",
    JobState.DEADLINE: "timeout",
}
#: Ends that need no exit code to be told from a preemption's.
LASTING = frozenset({JobState.COMPLETED, JobState.CANCELLED})
CRASHES = frozenset({JobState.FAILED, JobState.OUT_OF_MEMORY})

_HOLDS_BACK = frozenset({JobFlag.REQUEUE_HOLD, JobFlag.SPECIAL_EXIT})
#: TERM, or EX_TEMPFAIL: what our job script exits with when its worker was told to go, and what that was when Slurm put nothing back.
_LEFT = {128 + 15: "cancelled", 75: "preempted"}
_LEFT_ON_NOTICE = tuple(_LEFT)
_KILLED = (0, 128 + 9, *_LEFT_ON_NOTICE)
#: Our worker's own word that the daemon refused it, or that it is of another release: no node's fault. What it lacks where it runs is.
REFUSED = 78


class IllegalStage(ScavengerError):
    """A bug: an intent was moved in a way that the table does not hold. Nothing was changed."""


def intent_in(job: Job, uid: str) -> tuple[str, bool]:
    """The intent that a job carries, and whether its comment proves that it is of ledger `uid`. ("", False) for other users' jobs."""
    if not job.comment.startswith("scavenger:") and not job.name.startswith("scv-"):
        return "", False
    owner, _, intent = job.comment.partition(",")[0].removeprefix("scavenger:").partition(":")
    if job.comment.startswith("scavenger:") and INTENT.fullmatch(intent):
        return (intent, True) if owner == uid else ("", False)
    return (job.name, False) if INTENT.fullmatch(job.name) else ("", False)


def observed_state_of(job: Job) -> ObservedState:
    if JobFlag.COMPLETING in job.flags:
        return ObservedState.COMPLETES
    if job.flags & {JobFlag.REQUEUED, JobFlag.REQUEUE_FED, JobFlag.REQUEUE_HOLD, JobFlag.SPECIAL_EXIT}:
        return ObservedState.WAITS
    return _OBSERVED_STATE_OF[job.state]


def next_stage(stage: Stage, observed: ObservedState) -> Stage:
    """The stage that follows. Raises `IllegalStage` for an intent that is closed."""
    target = NEXT.get((stage, observed))
    if target is None:
        raise IllegalStage(f"an intent that is {stage} cannot be seen as {observed}")
    return target


def held_back(job: Job) -> str:
    """Why a pending job never starts by itself, or ""."""
    if job.flags & _HOLDS_BACK or job.reason.startswith(("JobHeld", "launch")):
        return job.reason or "+".join(sorted(job.flags))
    return ""


def launch_failed(job: Job) -> bool:
    """Whether Slurm put it back, held, because it could not be started: a prolog failed, a user is not known on the node."""
    return held_back(job).startswith("launch")


def held_word(job: Job) -> str:
    """How the ledger calls the allocation of a job that was requeued and is held by Slurm; "" for one that is not held."""
    why = held_back(job)
    return "failed" if launch_failed(job) else "requeued" if why else ""


def end_word(job: Job) -> str:
    """How the ledger calls the allocation of a job in this state; "" while its state is no end.

    Our job script ends as FAILED by its own choice in two cases: with 75 when the engine left on Slurm's notice and no requeue was taken,
    and with 143 when a user signalled all of the job (`scancel --full --signal=TERM`): Slurm's own signal comes with another state.
    """
    if job.state is JobState.FAILED and job.exit_code in _LEFT:
        return _LEFT[job.exit_code]
    return END_REASONS.get(job.state, "")


def accounted_word(state: str) -> str:
    """How the ledger calls an allocation that ended so in Slurm's accounting; "" for a word that is no end."""
    if state == "REQUEUED":  # by `scontrol requeue`: ours on Slurm's notice, or a user's
        return "requeued"
    return END_REASONS.get(JobState(state), "") if state in JobState.__members__ else ""


def left_on_notice(job: Job) -> bool:
    """Whether a job that FAILED did so because its worker was told to go: by Slurm, which may put it back."""
    return job.state is JobState.FAILED and job.exit_code in _LEFT_ON_NOTICE


def crashed(job: Job) -> bool:
    """Whether the engine itself failed. While a job is completing only its exit code can tell: no killed one's, no unread one."""
    if job.state in CRASHES:
        return job.exit_code not in _LEFT_ON_NOTICE
    ends = job.state is JobState.RUNNING and JobFlag.COMPLETING in job.flags
    return ends and job.exit_code is not None and job.exit_code not in _KILLED
