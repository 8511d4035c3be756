"""One training step as rank 0 hears of it: the train-step state machine beside what the daemon and the launcher said. Sans-IO.

    Fleet (daemon), Memory (daemon and launcher)  -> observe -> events that are news to the machine
    those, and the driver's own (groups, training) -> react   -> actions, which the driver performs in their order

The trainer's `Stepper` drives it, and so does the simulator's training job. Knows no clock, no rank, no group's content.
"""

from __future__ import annotations

from scavenger.protocol import train_step
from scavenger.protocol.messages import Fleet
from scavenger.protocol.reserved_memory import ReservedObservation

#: What the daemon says of the window, and what that decides.
WINDOW: dict[str, train_step.SeedWindowState] = {
    "open": train_step.SeedWindowState.OPEN,
    "close": train_step.SeedWindowState.CLOSED,
    "": train_step.SeedWindowState.UNDECIDED,
}


class StepSession:
    """`state` is the machine's; `first` are the step's first actions. `heeds_window`: the daemon's word on the window is of this step."""

    def __init__(
        self,
        plan: train_step.StepPlan,
        fleet: Fleet,
        memory: ReservedObservation | None,
        *,
        reserved_awake: bool,
        now: float,
        heeds_window: bool = True,
    ) -> None:
        self._heeds_window = heeds_window
        self._memory_now: train_step.ReservedAsleep | train_step.ReservedHolds | None = None
        acknowledged = memory.event if memory is not None and plan.reserved and not reserved_awake else None
        self.state, self.first = train_step.begin(
            plan,
            harvested=fleet.harvested,
            reserved_awake=reserved_awake,
            now=now,
            decided=self._window(fleet),
            window_reason=fleet.window_reason,
            keep_open=self._keep_open(fleet),
            sleep_ack=acknowledged if isinstance(acknowledged, train_step.ReservedAsleep) else None,
        )

    def _window(self, fleet: Fleet) -> train_step.SeedWindowState:
        return WINDOW[fleet.window] if self._heeds_window else train_step.SeedWindowState.UNDECIDED

    def _keep_open(self, fleet: Fleet) -> bool:
        return self._heeds_window and fleet.window == "open" and fleet.keep_open

    def observe(self, fleet: Fleet, memory: ReservedObservation | None) -> list[train_step.Event]:
        """What was said last, where that is news. `memory`: of the reserved engines; None where there is nothing to say of it."""
        events: list[train_step.Event] = []
        if fleet.harvested != self.state.harvested:
            reserved = fleet.reserved_awake + fleet.reserved_asleep
            events.append(train_step.FleetChanged(fleet.harvested, reserved))
        said = train_step.WindowDecided(self._window(fleet), fleet.window_reason, self._keep_open(fleet))
        if (said.window, said.keep_open) != (self.state.decided, self.state.keep_open):
            events.append(said)
        return [*events, *self.observe_memory(memory)]

    def observe_memory(self, memory: ReservedObservation | None) -> list[train_step.Event]:
        """The same of the reserved engines' memory alone."""
        state = self.state
        if memory is None or memory.event is None or not state.plan.reserved or state.reserved_awake:
            return []
        known = self._memory_now or state.sleep_ack or train_step.ReservedHolds(state.holding)
        if memory.event == known:
            return []
        self._memory_now = memory.event
        return [memory.event]

    def react(self, event: train_step.Event, now: float) -> tuple[train_step.Action, ...]:
        """As `train_step.react`; a refused event changes nothing. What was seen last of the reserved engines' memory counts at once,
        whatever waits before it: no round begins beside an engine that holds memory, and no deadline passes over an acknowledgement.
        """
        state, memory = self.state, self._memory_now
        if memory is not None and not state.reserved_awake:
            state = train_step.note_memory(state, memory, now)
        if isinstance(event, train_step.ReservedAsleep | train_step.ReservedHolds):
            # The newest counts, and after an order none of before it.
            event = memory if memory is not None else train_step.StepTick()
        self.state, actions = train_step.react(state, event, now)
        ordered = any(isinstance(one, train_step.WakeReserved | train_step.SleepReserved) for one in actions)
        if ordered or self.state.reserved_awake:
            self._memory_now = None
        return actions

    @property
    def finished(self) -> bool:
        return self.state.phase is train_step.StepPhase.FINISH
