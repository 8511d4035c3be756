"""What Slurm can show of one of our jobs, and what follows: `docs/slurm-states.md` as data. Pure.

The table owns nothing that happens: `sights` and `tracker` do it, `policy` decides. Every row is played through them by
`tests/harvest/test_states.py`, which also holds the page to this table. Change the three together.
"""

from __future__ import annotations

from dataclasses import dataclass

from scavenger.cluster.error_kind import ErrorKind
from scavenger.harvest.track.observed_jobs import ObservedState


@dataclass(frozen=True, slots=True)
class State:
    """One row. `allocation`: how the ledger's hold ends, "" while it goes on. `told`: the router learns at
    once that this incarnation is over.

    `stays`: the intent stays open and its job counts as ours, because it comes, or is, back. `then`: what is done about it.
    """

    name: str
    shown: str
    observed: ObservedState
    allocation: str
    told: bool
    stays: bool
    then: str


STATES: tuple[State, ...] = (
    State(
        "PENDING",
        "waits for its first start",
        ObservedState.WAITS,
        "",
        False,
        True,
        "counts as pending; held ones are cancelled",
    ),
    State(
        "CONFIGURING",
        "has its node, which is being set up",
        ObservedState.HOLDS,
        "",
        False,
        True,
        "its GPUs count as ours from now on",
    ),
    State(
        "RUNNING",
        "runs",
        ObservedState.HOLDS,
        "",
        False,
        True,
        "the engine's own connection says whether it lives",
    ),
    State(
        "SUSPENDED",
        "gang scheduling or an admin stopped it",
        ObservedState.HOLDS,
        "",
        False,
        True,
        "it keeps its GPUs; its silence moves its samples",
    ),
    State(
        "COMPLETING",
        "its processes are going",
        ObservedState.COMPLETES,
        "",
        True,
        True,
        "samples move; its GPUs are counted until they are free, and nothing is submitted for them",
    ),
    State(
        "REQUEUED",
        "put back, restart count + 1",
        ObservedState.WAITS,
        "preempted",
        True,
        True,
        "the same job serves the demand once it starts",
    ),
    State(
        "REQUEUE_HOLD",
        "put back and held",
        ObservedState.WAITS,
        "requeued",
        True,
        True,
        "it would never start: cancelled, and another submitted",
    ),
    State(
        "SPECIAL_EXIT",
        "held after a special exit code",
        ObservedState.WAITS,
        "requeued",
        True,
        True,
        "as REQUEUE_HOLD",
    ),
    State(
        "launch failed",
        "pending, launch_failed_requeued_held",
        ObservedState.WAITS,
        "failed",
        True,
        True,
        "as REQUEUE_HOLD",
    ),
    State(
        "PREEMPTED",
        "then PENDING, same id, restart count + 1",
        ObservedState.RETURNS,
        "preempted",
        True,
        True,
        "samples move; the job comes back",
    ),
    State(
        "NODE_FAIL",
        "then PENDING, same id, restart count + 1",
        ObservedState.RETURNS,
        "node_fail",
        True,
        True,
        "samples move; the job comes back, no engine is blamed",
    ),
    State(
        "BOOT_FAIL",
        "then PENDING, same id, restart count + 1",
        ObservedState.RETURNS,
        "node_fail",
        True,
        True,
        "as NODE_FAIL",
    ),
    State(
        "PREEMPTED, not requeued",
        "and stays so (PreemptMode=CANCEL)",
        ObservedState.RETURNS,
        "preempted",
        True,
        False,
        "closed after absent_s; another is submitted",
    ),
    State(
        "OUT_OF_MEMORY",
        "over",
        ObservedState.FINISHED,
        "failed",
        True,
        False,
        "blamed on engine and node: back-off, then quarantine",
    ),
    State(
        "FAILED",
        "over, exit code not 0",
        ObservedState.FINISHED,
        "failed",
        True,
        False,
        "as OUT_OF_MEMORY; 78 (refused, another release) blames no node",
    ),
    State(
        "FAILED, 143",
        "over: somebody sent all of the job a SIGTERM",
        ObservedState.FINISHED,
        "cancelled",
        True,
        False,
        "nobody is blamed; another is submitted if wanted",
    ),
    State(
        "FAILED, 75",
        "over: told to leave, and no requeue was taken",
        ObservedState.FINISHED,
        "preempted",
        True,
        False,
        "as FAILED, 143, and counts as a preemption",
    ),
    State(
        "TIMEOUT",
        "over, its time limit came",
        ObservedState.FINISHED,
        "timeout",
        True,
        False,
        "nobody is blamed; another is submitted if wanted",
    ),
    State("DEADLINE", "over", ObservedState.FINISHED, "timeout", True, False, "as TIMEOUT"),
    State(
        "COMPLETED",
        "over, exit code 0",
        ObservedState.FINISHED,
        "completed",
        True,
        False,
        "back-off only if it never worked and left at once",
    ),
    State(
        "CANCELLED",
        "over",
        ObservedState.FINISHED,
        "cancelled",
        True,
        False,
        "another is submitted if wanted",
    ),
    State(
        "gone from the queue",
        "no longer listed",
        ObservedState.ABSENT,
        "unknown",
        False,
        False,
        "nothing at first; closed when it was gone for absent_s and two looks",
    ),
    State(
        "purged",
        "was over, and is no longer listed",
        ObservedState.ABSENT,
        "failed",
        True,
        False,
        "closed with the state that it had",
    ),
    State(
        "id given out again",
        "its id is another job's (the controller lost its state)",
        ObservedState.ABSENT,
        "unknown",
        False,
        False,
        "the id is forgotten at once, so that nothing is cancelled by it; then as gone from the queue",
    ),
    State(
        "node drained",
        "RUNNING, its node DRAIN",
        ObservedState.HOLDS,
        "",
        False,
        True,
        "no room there for others of ours; the engine is given back",
    ),
    State(
        "node not responding",
        "RUNNING, its node DOWN*",
        ObservedState.HOLDS,
        "",
        False,
        True,
        "Slurm decides; the engine's silence moves its samples; what then ends is node_fail",
    ),
    State(
        "reservation ahead",
        "RUNNING, a reservation begins soon",
        ObservedState.HOLDS,
        "",
        False,
        True,
        "the engine is given back before it begins",
    ),
    State(
        "partition down",
        "RUNNING, its partition DOWN, DRAIN or INACTIVE",
        ObservedState.HOLDS,
        "",
        False,
        True,
        "what runs goes on; nothing is submitted",
    ),
)

#: What a failed look means, and when the next one is. None of them cancels, closes or submits anything.
TROUBLES: dict[ErrorKind, tuple[str, str]] = {
    ErrorKind.NO_REPLY: (
        "slurmctld hangs, is slow, or hangs up (clocks differ by minutes, or keys)",
        "after fast_poll_interval_s, doubling to 300 s",
    ),
    ErrorKind.DOWN: (
        "nobody listens: slurmctld is stopped or restarting",
        "after fast_poll_interval_s, doubling to 300 s",
    ),
    ErrorKind.FAILING_OVER: (
        "a backup controller has not taken over yet",
        "after fast_poll_interval_s, doubling to 300 s",
    ),
    ErrorKind.AUTH: ("munge is down here", "after fast_poll_interval_s, doubling to 300 s"),
    ErrorKind.RATE_LIMITED: (
        "Slurm asks for fewer requests (rl_enable)",
        "after poll_interval_s, doubling to 300 s",
    ),
    ErrorKind.PARTIAL: (
        "an answer that is cut off, malformed, or leaves nodes out",
        "after fast_poll_interval_s, doubling to 300 s",
    ),
    ErrorKind.BACKEND: (
        "pyslurm's process ended or hung; it is started again",
        "after fast_poll_interval_s, doubling to 300 s",
    ),
}


def state_rows() -> list[str]:
    """The first table of the page, line by line."""
    yes = {True: "yes", False: "no"}
    head = [
        "| state | what Slurm shows | seen as | the hold ends as | router told at once | stays ours | what follows |",
        "|" + " --- |" * 7,
    ]
    return head + [
        f"| {row.name} | {row.shown} | {row.observed} | {row.allocation or 'goes on'} | {yes[row.told]} | {yes[row.stays]} | {row.then} |"
        for row in STATES
    ]


def trouble_rows() -> list[str]:
    """The second table of the page, line by line."""
    head = ["| trouble | what is wrong | the next look |", "|" + " --- |" * 3]
    return head + [f"| `{error_kind}` | {what} | {when} |" for error_kind, (what, when) in TROUBLES.items()]
