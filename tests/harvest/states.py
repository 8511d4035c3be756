"""What Slurm can show of one of our jobs, and what follows: `docs/slurm-states.md` as data. Pure.

The table owns nothing that happens: `observed_jobs` and `tracker` do it, `decide` decides. Every row is played through them by
`tests/harvest/test_states.py`, which also holds the page to this table. Change the three together.
"""

from __future__ import annotations

from dataclasses import dataclass

from scavenger.cluster.error_kind import ErrorKind
from scavenger.harvest.track.observed_jobs import ObservedState


@dataclass(frozen=True, slots=True)
class State:
    """One row. `allocation`: how the ledger's allocation ends, "" while it continues. `told`: the router learns at
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
        "counts it as pending; cancels it if Slurm holds it",
    ),
    State(
        "CONFIGURING",
        "has its node, which is being set up",
        ObservedState.ALLOCATED,
        "",
        False,
        True,
        "counts its GPUs as ours from now on",
    ),
    State(
        "RUNNING",
        "runs",
        ObservedState.ALLOCATED,
        "",
        False,
        True,
        "relies on the engine's own connection to see whether it lives",
    ),
    State(
        "SUSPENDED",
        "gang scheduling or an admin stopped it",
        ObservedState.ALLOCATED,
        "",
        False,
        True,
        "counts its GPUs; migrates its samples once the engine is silent",
    ),
    State(
        "COMPLETING",
        "its processes are going",
        ObservedState.COMPLETES,
        "",
        False,
        True,
        "migrates its samples at the engine's goodbye, or after 5 s; counts its GPUs until they are free; submits nothing for them",
    ),
    State(
        "REQUEUED",
        "requeued, restart count + 1",
        ObservedState.WAITS,
        "preempted",
        True,
        True,
        "expects the same job again, and submits no other",
    ),
    State(
        "REQUEUE_HOLD",
        "requeued and held",
        ObservedState.WAITS,
        "requeued",
        True,
        True,
        "cancels it, because it would never start, and submits another",
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
        "migrates its samples; expects the job back",
    ),
    State(
        "NODE_FAIL",
        "then PENDING, same id, restart count + 1",
        ObservedState.RETURNS,
        "node_fail",
        True,
        True,
        "migrates its samples; expects the job back; blames no engine",
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
        "closes it after absent_s; submits another",
    ),
    State(
        "OUT_OF_MEMORY",
        "over",
        ObservedState.FINISHED,
        "failed",
        True,
        False,
        "blames engine and node: back-off, then quarantine",
    ),
    State(
        "FAILED",
        "over, exit code not 0",
        ObservedState.FINISHED,
        "failed",
        True,
        False,
        "as OUT_OF_MEMORY; 78 (refused, another release) blames no node; 69, 70 and 72 of an engine that never worked blame the set-up",
    ),
    State(
        "FAILED, 143",
        "over: SIGTERM was sent to the whole job",
        ObservedState.FINISHED,
        "cancelled",
        True,
        False,
        "blames no node; submits another if wanted",
    ),
    State(
        "FAILED, 75",
        "over: the engine drained, and no requeue followed",
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
        "blames no node; submits another if wanted",
    ),
    State("DEADLINE", "over", ObservedState.FINISHED, "timeout", True, False, "as TIMEOUT"),
    State(
        "COMPLETED",
        "over, exit code 0",
        ObservedState.FINISHED,
        "completed",
        True,
        False,
        "backs off only if the engine never worked and ended at once",
    ),
    State("CANCELLED", "over", ObservedState.FINISHED, "cancelled", True, False, "submits another if wanted"),
    State(
        "gone from the queue",
        "no longer listed",
        ObservedState.ABSENT,
        "unknown",
        False,
        False,
        "nothing at first; closes it once it is missing for absent_s and in two polls",
    ),
    State(
        "purged",
        "was over, and is no longer listed",
        ObservedState.ABSENT,
        "failed",
        True,
        False,
        "closes it with the state that it had",
    ),
    State(
        "id given out again",
        "its id is another job's (the controller lost its state)",
        ObservedState.ABSENT,
        "unknown",
        False,
        False,
        "forgets the id at once, so that it cancels no other job; then as gone from the queue",
    ),
    State(
        "node drained",
        "RUNNING, its node DRAIN",
        ObservedState.ALLOCATED,
        "",
        False,
        True,
        "places no further engine there and drains this one",
    ),
    State(
        "node not responding",
        "RUNNING, its node DOWN*",
        ObservedState.ALLOCATED,
        "",
        False,
        True,
        "waits for Slurm; migrates its samples once the engine is silent; a job that then ends counts as node_fail",
    ),
    State(
        "reservation ahead",
        "RUNNING, a reservation begins soon",
        ObservedState.ALLOCATED,
        "",
        False,
        True,
        "drains the engine before it begins",
    ),
    State(
        "partition down",
        "RUNNING, its partition DOWN, DRAIN or INACTIVE",
        ObservedState.ALLOCATED,
        "",
        False,
        True,
        "running jobs continue; nothing is submitted",
    ),
)

#: What a failed poll means, and when the next one is. None of them cancels, closes or submits anything.
ERROR_KINDS: dict[ErrorKind, tuple[str, str]] = {
    ErrorKind.NO_REPLY: (
        "slurmctld hangs, is slow, or closes the connection (clocks or munge keys differ)",
        "after fast_poll_interval_s, doubling to 300 s",
    ),
    ErrorKind.DOWN: (
        "connection refused: slurmctld is stopped or restarting",
        "after fast_poll_interval_s, doubling to 300 s",
    ),
    ErrorKind.FAILING_OVER: (
        "a backup controller has not taken over yet",
        "after fast_poll_interval_s, doubling to 300 s",
    ),
    ErrorKind.AUTH: ("munge is down on this host", "after fast_poll_interval_s, doubling to 300 s"),
    ErrorKind.RATE_LIMITED: (
        "Slurm asks for fewer requests (rl_enable)",
        "after poll_interval_s, doubling to 300 s",
    ),
    ErrorKind.PARTIAL: (
        "a reply is cut off, malformed, or leaves nodes out",
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
        "| state | what Slurm shows | observed as | allocation ends as | router informed at once | job stays ours | what the daemon does |",
        "|" + " --- |" * 7,
    ]
    return head + [
        f"| {row.name} | {row.shown} | {row.observed} | {row.allocation or 'continues'} | {yes[row.told]} | {yes[row.stays]} | {row.then} |"
        for row in STATES
    ]


def error_kind_rows() -> list[str]:
    """The second table of the page, line by line."""
    head = ["| error kind | what is wrong | the next poll |", "|" + " --- |" * 3]
    return head + [
        f"| `{error_kind}` | {what} | {when} |" for error_kind, (what, when) in ERROR_KINDS.items()
    ]
