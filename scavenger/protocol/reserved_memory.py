"""Whether the reserved engines' memory is free: what the daemon and the launcher say of them, put together. Pure.

An engine's memory is free when the engine said so, of the newest order to sleep, or when its process is gone. A process that nobody has
heard of yet may hold memory, and so may one that fell silent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from scavenger.protocol import train_step
from scavenger.protocol.messages import Fleet


class Processes(Protocol):
    """A launcher's `slots`, and the names (`reserved_name`) of the engines that have a process now."""

    @property
    def slots(self) -> Collection[str]: ...
    @property
    def running(self) -> Collection[str]: ...


@dataclass(frozen=True, slots=True)
class ReservedObservation:
    """`event`: what the train-step state machine is told, None = nothing certain is known. `gone`: names of processes that are gone, which
    the daemon does not know. `ending`: names of those to be ended, should the time for an acknowledgement be over.
    """

    event: train_step.ReservedAsleep | train_step.ReservedHolds | None
    gone: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()


def observe(fleet: Fleet, order: int, processes: Processes | None, *, launched: bool) -> ReservedObservation:
    """`order`: of the trainer's last word to the daemon. `processes`: what the launcher answered to the last one to it, None = nothing yet.

    `launched`: there is a launcher. Engines that others started are known by the daemon alone, and cannot be ended here.
    """
    if launched and processes is None:
        return ReservedObservation(None)
    if (
        fleet.order != order
    ):  # the daemon has not acted upon the last word, or is away: whoever has a process may hold memory
        return ReservedObservation(
            None, ending=tuple(sorted(processes.running)) if processes is not None else ()
        )
    running, own = (
        (set(processes.running), set(processes.slots)) if processes is not None else (set[str](), set[str]())
    )
    asleep, holding = set(fleet.asleep) - set(fleet.holding), set(fleet.holding)
    late = tuple(sorted((holding | running) - asleep))
    gone = tuple(sorted(name for name in holding - running if name.rpartition(".")[0] in own))
    ending = tuple(sorted(running - asleep))
    return ReservedObservation(
        train_step.ReservedHolds(late) if late else train_step.ReservedAsleep(len(asleep), fleet.bytes_held),
        gone,
        ending,
    )
