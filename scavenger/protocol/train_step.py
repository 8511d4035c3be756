"""The train-step state machine. Pure: facts in, actions out, each with its reason.

Theory of operation. Reserved engines live on the training job's own GPUs, so either they generate or we train:

    SEED    reserved engines generate beside the harvested ones
    SLEEP   reserved engines were told to sleep, and nothing is trained until every one of them has acknowledged that its memory is free
    TRAIN   reserved engines sleep; completed groups are trained as they stream in
    WAKE    harvested capacity is gone with samples outstanding, or it was decided so: reserved engines generate (again), on the step's own
            version (parameters have not changed) and with the accumulated gradients kept (I11)
    FINISH  every sample has come and no group waits for the machine: train what the driver kept back (a barrier's batch, later
            mini-batches), then scale, clip, step

An engine that does not acknowledge within `StepPlan.sleep_timeout_s` is ended (`EndReserved`): its memory is free once its process is gone,
and the driver says so by the same event. Should an engine hold memory while we train (`ReservedHolds`), training waits in SLEEP again.

Whether reserved engines generate may be decided from outside (`WindowDecided`: the daemon knows the engines). While it is undecided, the
share of samples `StepPlan.window` does. Without a harvested engine, a decision to close has no effect: seeding goes on, or resumes after
`wake_after_s`. A step inherits the last decision, so 'open' also counts in SLEEP and TRAIN.

With steps in advance a decision may keep the window open (`WindowDecided.keep_open`): reserved engines that generate go on although
every sample has come, until the next step's are there as well, and both are trained without a change of the GPUs between them. It wakes
no engine.

The machine knows counts and times only: no group's content, no model, no socket, no clock. `RULES` says what fires (the first rule of
the current phase whose condition holds), `_apply` what that changes; `react` repeats both until none does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

#: What it may take until a process that is ended is gone: it is asked to leave first, and killed when it does not.
END_TIMEOUT_S = 30.0


class StepPhase(Enum):
    SEED = "seed"
    SLEEP = "sleep"
    TRAIN = "train"
    WAKE = "wake"
    FINISH = "finish"


class SeedWindowState(Enum):
    """What was decided of the seed window: whether reserved engines shall generate. UNDECIDED: by the share, not the daemon."""

    OPEN = "open"
    CLOSED = "closed"
    UNDECIDED = "undecided"


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class GroupsCompleted:
    """`samples` more samples, of `groups` groups, have come. `untrained` of the groups have nothing to train before FINISH: zero variance,
    masked, or kept for later by the driver.

    `scoring` of them wait for their rewards: `GroupsScored` is to follow.
    """

    groups: int
    samples: int
    untrained: int = 0
    scoring: int = 0


@dataclass(frozen=True, slots=True)
class GroupsScored:
    """`groups` of those that waited for their rewards have them. `untrained` as in `GroupsCompleted`."""

    groups: int
    untrained: int = 0


@dataclass(frozen=True, slots=True)
class GroupsAdded:
    """The step asked for more than its plan said: `samples` samples in `groups` groups."""

    groups: int
    samples: int


@dataclass(frozen=True, slots=True)
class GroupsDeferred:
    """The step asked for these groups, with so many samples; they came late, and a later step trains them."""

    groups: int
    samples: int


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """Live workers, as the daemon last said. `reserved`: awake or asleep."""

    harvested: int
    reserved: int


@dataclass(frozen=True, slots=True)
class WindowDecided:
    """CLOSED: reserved engines shall stop generating. OPEN: they shall go on, or begin again. UNDECIDED: the daemon no longer decides.
    `keep_open`, beside OPEN: those that generate go on although every sample of the step has come, for the next step.
    """

    window: SeedWindowState
    reason: str
    keep_open: bool = False


@dataclass(frozen=True, slots=True)
class ReservedAsleep:
    """Every reserved engine acknowledged the newest order to sleep, or its process is gone. Together they hold `bytes_held` bytes yet."""

    engines: int
    bytes_held: int


@dataclass(frozen=True, slots=True)
class ReservedHolds:
    """Some reserved engine has not given its memory back, or has taken it again: `names` of those, as their slots."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """`groups` of the waiting groups went through a micro-step, or were kept for a later mini-batch."""

    groups: int


@dataclass(frozen=True, slots=True)
class StepTick:
    """Time passed."""


Event = (
    GroupsCompleted
    | GroupsScored
    | GroupsAdded
    | GroupsDeferred
    | FleetChanged
    | WindowDecided
    | ReservedAsleep
    | ReservedHolds
    | Trained
    | StepTick
)


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class SleepReserved:
    reason: str


@dataclass(frozen=True, slots=True)
class WakeReserved:
    """Give the GPUs' memory back, then let reserved engines take theirs."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndReserved:
    """End the processes of the reserved engines that have not acknowledged that they sleep. `again`: it was asked for, and did not help."""

    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class TrainReady:
    """Run one round of micro-steps over the waiting groups, then report `Trained`."""

    reason: str


@dataclass(frozen=True, slots=True)
class FinishStep:
    reason: str


Action = SleepReserved | WakeReserved | EndReserved | TrainReady | FinishStep


# ---------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step asked for. `window` is a share of `samples`; `round_groups` fills every rank once."""

    samples: int
    groups: int
    window: float
    wake_after_s: float
    harvest: bool
    reserved: bool
    round_groups: int = 1
    sleep_timeout_s: float = 60.0  # within which a reserved engine acknowledges that it sleeps
    ahead: bool = (
        False  # while the trainer waits for rewards, reserved engines may generate samples of later steps
    )


@dataclass(frozen=True, slots=True)
class StepState:
    """One step's facts. `gone_at`/`back_at`: since when there is no / at least one harvested worker (None: not so now).

    `passed_groups`: those that were trained, or have nothing to train before FINISH.
    `decided`: what was decided of the window; `keep_open`: for the next step, too; `window_reason`: why. `sleep_ack`: what reserved engines
    acknowledged, None = not all have; `holding`: who has not; `sleep_asked_at`: since when they are to sleep, or were last ended;
    `end_attempts`: how often they were.
    """

    plan: StepPlan
    phase: StepPhase = StepPhase.SEED
    reserved_awake: bool = False
    done_samples: int = 0
    done_groups: int = 0
    passed_groups: int = 0
    scoring_groups: int = 0  # came, and wait for their rewards
    harvested: int = 0
    gone_at: float | None = None
    back_at: float | None = None
    decided: SeedWindowState = SeedWindowState.UNDECIDED
    keep_open: bool = False
    window_reason: str = ""
    sleep_ack: ReservedAsleep | None = None
    holding: tuple[str, ...] = ()
    sleep_asked_at: float = 0.0
    end_attempts: int = 0
    log: tuple[str, ...] = field(default=())

    @property
    def outstanding(self) -> int:
        return self.plan.samples - self.done_samples

    @property
    def awaited(self) -> bool:
        """Whether reserved engines have a use: samples of the step are outstanding, or of later steps while rewards are waited for."""
        return self.outstanding > 0 or (
            self.plan.ahead and self.scoring_groups > 0 and self.decided is SeedWindowState.OPEN
        )

    @property
    def kept_open(self) -> bool:
        """Whether reserved engines that are awake go on for the next step, though this one has every sample. It wakes none."""
        decided = self.decided is SeedWindowState.OPEN and self.keep_open
        return self.plan.ahead and self.reserved_awake and decided

    @property
    def waits_for_samples(self) -> bool:
        """Whether the trainer has its GPUs, has no full round to do, and waits for nothing but outstanding samples."""
        idle = (
            self.ready_groups < self.plan.round_groups and not self.scoring_groups and self.passed_groups > 0
        )
        return self.phase is StepPhase.TRAIN and idle and self.outstanding > 0

    @property
    def ready_groups(self) -> int:
        return self.done_groups - self.passed_groups - self.scoring_groups


def begin(
    plan: StepPlan,
    *,
    harvested: int,
    reserved_awake: bool,
    now: float,
    decided: SeedWindowState = SeedWindowState.UNDECIDED,
    window_reason: str = "",
    keep_open: bool = False,
    sleep_ack: ReservedAsleep | None = None,
) -> tuple[StepState, tuple[Action, ...]]:
    """The step's first state and actions: reserved engines generate unless the window is closed from the start.

    `sleep_ack`: what they acknowledged of an earlier step's order to sleep, where that still holds.
    """
    here = harvested > 0 and plan.harvest
    state = StepState(
        plan,
        reserved_awake=reserved_awake,
        harvested=harvested if plan.harvest else 0,
        gone_at=None if here else now,
        back_at=now if here else None,
        decided=decided,
        keep_open=keep_open,
        window_reason=window_reason,
        sleep_ack=None if reserved_awake else sleep_ack,
        sleep_asked_at=now,
    )
    return _fire_rules(state, now)


# ---------------------------------------------------------------- conditions: (state, now) -> a reason, or None


def _asleep_in_seed(state: StepState, now: float) -> str | None:
    if state.plan.reserved and not state.reserved_awake and not _seed_over(state, now):
        return "the seed window opens"
    return None


def _nobody_seeds(state: StepState, now: float) -> str | None:
    return None if state.plan.reserved else "there are no reserved engines to seed with"


def _window_says_close(state: StepState) -> str | None:
    """A decision closes the window only while harvested engines live."""
    closes = state.decided is SeedWindowState.CLOSED and state.harvested > 0
    return f"decided: {state.window_reason}" if closes else None


def _seed_over(state: StepState, now: float) -> str | None:
    plan = state.plan
    if not (state.awaited or state.kept_open):
        return "every sample has come"
    if state.decided is not SeedWindowState.UNDECIDED:
        return _window_says_close(state)
    if state.harvested > 0 and state.done_samples >= plan.window * plan.samples:
        done = f"{state.done_samples}/{plan.samples}"
        return (
            f"the window of {plan.window:g} is reached ({done}) and {state.harvested} harvested engines live"
        )
    return None


def _not_told_to_sleep(state: StepState, now: float) -> str | None:
    return "reserved engines and training share GPUs" if state.reserved_awake else None


def _memory_free(state: StepState, now: float) -> str | None:
    if state.sleep_ack is None:
        return None
    return f"{state.sleep_ack.engines} reserved engines sleep and hold {state.sleep_ack.bytes_held} bytes"


def _memory_taken(state: StepState, now: float) -> str | None:
    if not state.plan.reserved or state.sleep_ack is not None:
        return None
    return f"reserved engines hold memory: {_names(state)}"


def _names(state: StepState) -> str:
    return ", ".join(state.holding) or "of none is it known that it sleeps"


def _overdue(state: StepState, now: float) -> str | None:
    limit = END_TIMEOUT_S if state.end_attempts else state.plan.sleep_timeout_s
    if now - state.sleep_asked_at < limit:
        return None
    if state.end_attempts:
        return f"still there {limit:g} s after they were to be ended: {_names(state)}"
    return f"no acknowledgement within {limit:g} s of being told to sleep: {_names(state)}"


def _harvested_gone(state: StepState, now: float) -> str | None:
    plan = state.plan
    if (
        not plan.reserved
        or state.outstanding == 0
        or state.gone_at is None
        or now - state.gone_at < plan.wake_after_s
    ):
        return None
    return f"no harvested engine for {now - state.gone_at:.1f} s with {state.outstanding} samples outstanding"


def _decided_open(state: StepState, now: float) -> str | None:
    if state.plan.reserved and state.awaited and state.decided is SeedWindowState.OPEN:
        return f"decided: {state.window_reason}"
    return None


def _reserved_no_longer_needed(state: StepState, now: float) -> str | None:
    if not (state.awaited or state.kept_open):
        return "every sample has come"
    if state.decided is not SeedWindowState.UNDECIDED:
        return _window_says_close(state)
    if state.back_at is not None and now - state.back_at >= state.plan.wake_after_s:
        return f"{state.harvested} harvested engines have lived for {now - state.back_at:.1f} s"
    return None


def _round_ready(state: StepState, now: float) -> str | None:
    if state.ready_groups >= state.plan.round_groups:
        return f"{state.ready_groups} groups wait"
    if state.ready_groups > 0 and state.outstanding == 0:
        last = f"the last {state.ready_groups} groups wait"
        return f"{last}, but for {state.scoring_groups} without rewards" if state.scoring_groups else last
    return None


def _all_trained(state: StepState, now: float) -> str | None:
    if state.outstanding == 0 and state.passed_groups == state.plan.groups:
        return f"{state.plan.groups} groups trained"
    return None


Condition = Callable[[StepState, float], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    phase: StepPhase
    when: Condition
    then: StepPhase
    action: (
        type[SleepReserved]
        | type[WakeReserved]
        | type[EndReserved]
        | type[TrainReady]
        | type[FinishStep]
        | None
    )


# SEED -> SLEEP sends nothing. The SLEEP rule that follows sends SleepReserved, so engines that sleep already get no second order.
RULES: tuple[Rule, ...] = (
    Rule(StepPhase.SEED, _asleep_in_seed, StepPhase.SEED, WakeReserved),
    Rule(StepPhase.SEED, _nobody_seeds, StepPhase.TRAIN, None),
    Rule(StepPhase.SEED, _seed_over, StepPhase.SLEEP, None),
    Rule(StepPhase.SLEEP, _harvested_gone, StepPhase.WAKE, WakeReserved),
    Rule(StepPhase.SLEEP, _decided_open, StepPhase.WAKE, WakeReserved),
    Rule(StepPhase.SLEEP, _not_told_to_sleep, StepPhase.SLEEP, SleepReserved),
    Rule(StepPhase.SLEEP, _memory_free, StepPhase.TRAIN, None),
    Rule(StepPhase.SLEEP, _overdue, StepPhase.SLEEP, EndReserved),
    Rule(StepPhase.TRAIN, _harvested_gone, StepPhase.WAKE, WakeReserved),
    Rule(StepPhase.TRAIN, _decided_open, StepPhase.WAKE, WakeReserved),
    Rule(StepPhase.TRAIN, _memory_taken, StepPhase.SLEEP, None),
    Rule(StepPhase.TRAIN, _all_trained, StepPhase.FINISH, FinishStep),
    Rule(StepPhase.TRAIN, _round_ready, StepPhase.TRAIN, TrainReady),
    Rule(StepPhase.WAKE, _reserved_no_longer_needed, StepPhase.SLEEP, None),
)


def _fire_rules(state: StepState, now: float) -> tuple[StepState, tuple[Action, ...]]:
    """Let rules fire until none does, or the driver is to train or to finish first."""
    actions: list[Action] = []
    while True:
        fired = next(
            ((rule, why) for rule in RULES if rule.phase is state.phase and (why := rule.when(state, now))),
            None,
        )
        if fired is None:
            return state, tuple(actions)
        rule, why = fired
        if rule.action is EndReserved:
            actions.append(EndReserved(why, again=state.end_attempts > 0))
        elif rule.action is not None:
            actions.append(rule.action(why))
        state = _apply(state, rule, why, now)
        if rule.action in (TrainReady, FinishStep):
            return state, tuple(actions)


def _apply(state: StepState, rule: Rule, why: str, now: float) -> StepState:
    """What a rule that fired changes."""
    if rule.action in (WakeReserved, SleepReserved):
        awake = rule.action is WakeReserved
        state = replace(
            state, reserved_awake=awake, sleep_ack=None, holding=(), sleep_asked_at=now, end_attempts=0
        )
    if rule.then is not state.phase:
        change = f"{state.phase.value} -> {rule.then.value}: {why}"
        state = replace(state, phase=rule.then, log=(*state.log, change))
    if rule.action is EndReserved:
        ended = f"{state.phase.value}: ended: {why}"
        attempts = state.end_attempts + 1
        state = replace(state, sleep_asked_at=now, end_attempts=attempts, log=(*state.log, ended))
    return state


def _observe_fleet(state: StepState, event: FleetChanged, now: float) -> StepState:
    harvested = event.harvested if state.plan.harvest else 0
    if harvested > 0:
        return replace(
            state,
            harvested=harvested,
            gone_at=None,
            back_at=state.back_at if state.back_at is not None else now,
        )
    return replace(
        state, harvested=0, back_at=None, gone_at=state.gone_at if state.gone_at is not None else now
    )


def note_memory(state: StepState, event: ReservedAsleep | ReservedHolds, now: float) -> StepState:
    """What reserved engines hold. While they are to be awake, that they sleep is an older order's acknowledgement."""
    if state.reserved_awake:
        return state
    if isinstance(event, ReservedAsleep):
        return replace(state, sleep_ack=event, holding=(), end_attempts=0)
    began = now if state.sleep_ack is not None else state.sleep_asked_at
    return replace(state, sleep_ack=None, holding=event.names, sleep_asked_at=began)


def react(state: StepState, event: Event, now: float) -> tuple[StepState, tuple[Action, ...]]:
    """Take in one event at time `now` (seconds, any monotonic origin); return the new state and what to do, in order.

    Raises `ValueError` for an event that cannot be (more samples than were asked for, training what did not come); the state
    given is unchanged.
    """
    if state.phase is StepPhase.FINISH:
        raise ValueError(f"{event} after the step was finished")
    match event:
        case GroupsCompleted(groups, samples, untrained, scoring):
            if (
                state.done_samples + samples > state.plan.samples
                or state.done_groups + groups > state.plan.groups
            ):
                raise ValueError(
                    f"{event}: more than the {state.plan.samples} samples that the step asked for"
                )
            state = replace(
                state,
                done_samples=state.done_samples + samples,
                done_groups=state.done_groups + groups,
                passed_groups=state.passed_groups + untrained,
                scoring_groups=state.scoring_groups + scoring,
            )
        case GroupsScored(groups, untrained):
            if groups > state.scoring_groups:
                raise ValueError(f"{event}: only {state.scoring_groups} groups wait for rewards")
            state = replace(
                state,
                passed_groups=state.passed_groups + untrained,
                scoring_groups=state.scoring_groups - groups,
            )
        case GroupsAdded(groups, samples):
            plan = replace(
                state.plan, samples=state.plan.samples + samples, groups=state.plan.groups + groups
            )
            state = replace(state, plan=plan)
        case GroupsDeferred(groups, samples):
            if samples > state.outstanding or groups > state.plan.groups - state.done_groups:
                raise ValueError(f"{event}: only {state.outstanding} samples of the step are outstanding")
            plan = replace(
                state.plan, samples=state.plan.samples - samples, groups=state.plan.groups - groups
            )
            state = replace(state, plan=plan)
        case FleetChanged():
            state = _observe_fleet(state, event, now)
        case WindowDecided(window, reason, keep_open):
            state = replace(state, decided=window, window_reason=reason, keep_open=keep_open)
        case ReservedAsleep() | ReservedHolds():
            state = note_memory(state, event, now)
        case Trained(groups):
            if groups > state.ready_groups:
                raise ValueError(f"{event}: only {state.ready_groups} groups wait")
            state = replace(state, passed_groups=state.passed_groups + groups)
        case StepTick():
            pass
    return _fire_rules(state, now)
