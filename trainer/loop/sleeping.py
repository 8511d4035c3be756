"""Whether the reserved engines' memory is free: what the daemon and the launcher say of them, put together. Pure.

An engine's memory is free when the engine said so, of the newest order to sleep, or when its process is gone. A process that nobody has
heard of yet may hold memory, and so may one that fell silent.
Boundary: what is concluded of reserved engines' memory; pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from scavenger.protocol import train_step
from scavenger.protocol.messages import Fleet
from trainer.engine_control import Present


@dataclass(frozen=True, slots=True)
class Found:
    """`event`: what the train-step state machine is told, None = nothing certain is known. `gone`: names of processes that are gone, which
    the daemon does not know. `ending`: names of those to be ended, should the time for an acknowledgement be over.
    """

    event: train_step.ReservedAsleep | train_step.ReservedHolds | None
    gone: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()


def observe(fleet: Fleet, order: int, present: Present | None, *, launched: bool) -> Found:
    """`order`: of the trainer's last word to the daemon. `present`: what the launcher answered to the last one to it, None = nothing yet.

    `launched`: there is a launcher. Engines that others started are known by the daemon alone, and cannot be ended here.
    """
    if fleet.order != order or (launched and present is None):
        return Found(None)
    processes, own = (set(present.running), set(present.slots)) if present is not None else (set(), set())
    asleep, holding = set(fleet.asleep) - set(fleet.holding), set(fleet.holding)
    late = tuple(sorted((holding | processes) - asleep))
    gone = tuple(sorted(name for name in holding - processes if name.rpartition(".")[0] in own))
    ending = tuple(sorted(processes - asleep))
    return Found(
        train_step.ReservedHolds(late) if late else train_step.ReservedAsleep(len(asleep), fleet.bytes_held),
        gone,
        ending,
    )
