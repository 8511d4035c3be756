"""How long a preempted job's processes have, and how long one that hangs keeps its GPUs: Slurm's timing, as measured. Pure.

Measured on Slurm 22.05 (docs/admin.md has the table). At the start of a GraceTime, or at once where there is none, processes under `srun`
get SIGCONT and SIGTERM. With a GraceTime SIGKILL comes no earlier than the larger of GraceTime and KillWait + MessageTimeout, and then
only at one of the controller's checks of limits; without one it comes after KillWait. Seconds throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The controller looks at the limits of jobs so often (`PERIODIC_TIMEOUT` in slurmctld).
LIMIT_CHECK_S = 30.0


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """`least_s`: from SIGTERM to SIGKILL at least. `most_s`: the longest that a process which ignores SIGTERM keeps its GPUs."""

    least_s: float
    most_s: float


def notice(grace_s: float, kill_wait_s: float, message_timeout_s: float) -> PreemptionNotice:
    if grace_s <= 0:
        return PreemptionNotice(kill_wait_s, kill_wait_s + message_timeout_s)
    least_s = max(grace_s, kill_wait_s + message_timeout_s)
    return PreemptionNotice(least_s, least_s + LIMIT_CHECK_S + kill_wait_s)
