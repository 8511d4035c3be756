"""What Slurm can show of one of our jobs, and what follows: `docs/slurm-states.md` as data. Pure.

The table owns nothing that happens: `sights` and `tracker` do it, `policy` decides. Every row is played through them by
`tests/harvest/test_states.py`, which also holds the page to this table. Change the three together.
"""

from __future__ import annotations

from dataclasses import dataclass

from scavenger.cluster.trouble import Trouble
from scavenger.harvest.sights import Sight


@dataclass(frozen=True, slots=True)
class State:
    """One row. `hold`: how the ledger's hold ends, "" while it goes on. `told`: the router learns at once that this incarnation is over.

    `stays`: the intent stays open and its job counts as ours, because it comes, or is, back. `then`: what is done about it.
    """

    name: str
    shown: str
    sight: Sight
    hold: str
    told: bool
    stays: bool
    then: str


STATES: tuple[State, ...] = (
    State("PENDING", "waits for its first start", Sight.WAITS, "", False, True, "counts as pending; held ones are cancelled"),
    State("CONFIGURING", "has its node, which is being set up", Sight.HOLDS, "", False, True, "its GPUs count as ours from now on"),
    State("RUNNING", "runs", Sight.HOLDS, "", False, True, "the engine's own connection says whether it lives"),
    State("SUSPENDED", "gang scheduling or an admin stopped it", Sight.HOLDS, "", False, True,
          "it keeps its GPUs; its silence moves its samples"),
    State("COMPLETING", "its processes are going", Sight.COMPLETES, "", True, True,
          "samples move; its GPUs are counted until they are free, and nothing is submitted for them"),
    State("REQUEUED", "put back, restart count + 1", Sight.WAITS, "preempted", True, True,
          "the same job serves the demand once it starts"),
    State("REQUEUE_HOLD", "put back and held", Sight.WAITS, "requeued", True, True,
          "it would never start: cancelled, and another submitted"),
    State("SPECIAL_EXIT", "held after a special exit code", Sight.WAITS, "requeued", True, True, "as REQUEUE_HOLD"),
    State("launch failed", "pending, launch_failed_requeued_held", Sight.WAITS, "failed", True, True, "as REQUEUE_HOLD"),
    State("PREEMPTED", "then PENDING, same id, restart count + 1", Sight.RETURNS, "preempted", True, True,
          "samples move; the job comes back"),
    State("NODE_FAIL", "then PENDING, same id, restart count + 1", Sight.RETURNS, "node_fail", True, True,
          "samples move; the job comes back, no engine is blamed"),
    State("BOOT_FAIL", "then PENDING, same id, restart count + 1", Sight.RETURNS, "node_fail", True, True, "as NODE_FAIL"),
    State("PREEMPTED, not requeued", "and stays so (PreemptMode=CANCEL)", Sight.RETURNS, "preempted", True, False,
          "closed after absent_s; another is submitted"),
    State("OUT_OF_MEMORY", "over", Sight.FINISHED, "failed", True, False, "blamed on engine and node: back-off, then quarantine"),
    State("FAILED", "over, exit code not 0", Sight.FINISHED, "failed", True, False,
          "as OUT_OF_MEMORY; 78 (refused, another release) blames no node"),
    State("FAILED, 143", "over: somebody sent all of the job a SIGTERM", Sight.FINISHED, "cancelled", True, False,
          "nobody is blamed; another is submitted if wanted"),
    State("FAILED, 75", "over: told to leave, and no requeue was taken", Sight.FINISHED, "preempted", True, False,
          "as FAILED, 143, and counts as a preemption"),
    State("TIMEOUT", "over, its time limit came", Sight.FINISHED, "timeout", True, False,
          "nobody is blamed; another is submitted if wanted"),
    State("DEADLINE", "over", Sight.FINISHED, "timeout", True, False, "as TIMEOUT"),
    State("COMPLETED", "over, exit code 0", Sight.FINISHED, "completed", True, False,
          "back-off only if it never worked and left at once"),
    State("CANCELLED", "over", Sight.FINISHED, "cancelled", True, False, "another is submitted if wanted"),
    State("gone from the queue", "no longer listed", Sight.ABSENT, "unknown", False, False,
          "nothing at first; closed when it was gone for absent_s and two looks"),
    State("purged", "was over, and is no longer listed", Sight.ABSENT, "failed", True, False, "closed with the state that it had"),
    State("id given out again", "its id is another job's (the controller lost its state)", Sight.ABSENT, "unknown", False, False,
          "the id is forgotten at once, so that nothing is cancelled by it; then as gone from the queue"),
    State("node drained", "RUNNING, its node DRAIN", Sight.HOLDS, "", False, True,
          "no room there for others of ours; the engine is given back"),
    State("node not responding", "RUNNING, its node DOWN*", Sight.HOLDS, "", False, True,
          "Slurm decides; the engine's silence moves its samples; what then ends is node_fail"),
    State("reservation ahead", "RUNNING, a reservation begins soon", Sight.HOLDS, "", False, True,
          "the engine is given back before it begins"),
    State("partition down", "RUNNING, its partition DOWN, DRAIN or INACTIVE", Sight.HOLDS, "", False, True,
          "what runs goes on; nothing is submitted"),
)  # fmt: skip

#: What a failed look means, and when the next one is. None of them cancels, closes or submits anything.
TROUBLES: dict[Trouble, tuple[str, str]] = {
    Trouble.NO_ANSWER: ("slurmctld hangs, is slow, or hangs up (clocks differ by minutes, or keys)", "after quick_s, doubling to 300 s"),
    Trouble.DOWN: ("nobody listens: slurmctld is stopped or restarting", "after quick_s, doubling to 300 s"),
    Trouble.FAILING_OVER: ("a backup controller has not taken over yet", "after quick_s, doubling to 300 s"),
    Trouble.AUTH: ("munge is down here", "after quick_s, doubling to 300 s"),
    Trouble.RATE_LIMITED: ("Slurm asks for fewer requests (rl_enable)", "after observe_s, doubling to 300 s"),
    Trouble.PARTIAL: ("an answer that is cut off, malformed, or leaves nodes out", "after quick_s, doubling to 300 s"),
    Trouble.BACKEND: ("pyslurm's process ended or hung; it is started again", "after quick_s, doubling to 300 s"),
}


def state_rows() -> list[str]:
    """The first table of the page, line by line."""
    yes = {True: "yes", False: "no"}
    head = [
        "| state | what Slurm shows | seen as | the hold ends as | router told at once | stays ours | what follows |",
        "|" + " --- |" * 7,
    ]
    return head + [
        f"| {row.name} | {row.shown} | {row.sight} | {row.hold or 'goes on'} | {yes[row.told]} | {yes[row.stays]} | {row.then} |"
        for row in STATES
    ]


def trouble_rows() -> list[str]:
    """The second table of the page, line by line."""
    head = ["| trouble | what is wrong | the next look |", "|" + " --- |" * 3]
    return head + [f"| `{trouble}` | {what} | {when} |" for trouble, (what, when) in TROUBLES.items()]
