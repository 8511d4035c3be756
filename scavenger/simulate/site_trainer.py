"""The training job's rank 0 in virtual time: the real train-step state machine over the trainer's cost model. Theory of operation:

    submit -> SEED / TRAIN / WAKE as `protocol.train_step` says -> optimizer -> publish -> commit -> submit the next step

Rank 0 does one thing at a time, as the real one: while it computes, what arrives waits. Owns where a step's seconds went. It knows groups
by what the daemon delivers; lengths it learns when they are there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from scavenger.errors import SimulationError
from scavenger.protocol import reserved_memory, train_step
from scavenger.protocol.messages import (
    PROTOCOL,
    Accepted,
    Call,
    CallBody,
    CommitStep,
    DeferLate,
    Deferred,
    Denied,
    EndReserved,
    EngineSpec,
    Fleet,
    GroupDone,
    GroupSpec,
    Message,
    OpenRun,
    Ping,
    PublishVersion,
    Reply,
    SampleOutcome,
    Sampling,
    SetReserved,
    SubmitGroups,
    Trained,
    WeightSource,
)
from scavenger.protocol.step_session import StepSession
from scavenger.router.core.events import PeerIdentity, TrainerCalled
from scavenger.simulate import trainer_model as cost
from scavenger.simulate.clock import Simulation, Timer
from scavenger.simulate.outcome import StepOutcome
from scavenger.simulate.policies import SimulatedPolicy
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.site_daemon import SimDaemon
from scavenger.simulate.site_engine import root_of, zeros
from scavenger.weights.manifest import Adapter

RUN = "run"
OWNER = PeerIdentity("owner", "owner")
_SOURCE = WeightSource("simulated", "", b"")
ADAPTER_RANK = 16
#: What the daemon reads of manifests: the first version is the base of all later ones' adapters, and of equal runs the same.
_BASE = msgspec.msgpack.encode({"root": root_of(1)})
_ADAPTERS = msgspec.msgpack.encode({"adapter": Adapter(root_of(1), 1.0, "bfloat16")})
PING_S = 20.0
#: What was trained is told with the next ping, and a live trainer pings every second (`client.PING_S`). The others say nothing new.
TELL_S = 1.0
#: Between two questions whether late groups may be trained in a later step.
LATE_AGAIN_S = 1.0


@dataclass(slots=True)
class _Seconds:
    seed: float = 0.0
    toggle: float = 0.0
    wait: float = 0.0
    train: float = 0.0  # the round under way included
    trained: float = 0.0  # of the rounds that are over
    update: float = 0.0
    publish: float = 0.0


@dataclass(slots=True)
class Under:
    """The step under way. `window_end`: when reserved engines first went to sleep."""

    step: int
    start_s: float
    harvested: int
    session: StepSession
    ready: deque[GroupDone] = field(default_factory=deque)
    done: list[GroupDone] = field(default_factory=list)
    seconds: _Seconds = field(default_factory=_Seconds)
    window_end: float = -1.0
    late_asked_at: float = -math.inf
    unscored: list[GroupDone] = field(default_factory=list)  # of `done`, those whose rewards are waited for
    training: list[GroupDone] = field(default_factory=list)  # those of the round under way
    scored: list[GroupDone] = field(
        default_factory=list
    )  # those whose rewards came, as the machine is yet to hear
    rounds: int = 0
    toggles: dict[str, float] = field(default_factory=dict)  # what each way of the toggle took, as metrics


#: What a launcher waits between asking an engine to leave and killing it (`trainer.reserved.STOP_S`).
STOP_S = 5.0


class ReservedProcesses(Protocol):
    """What a job's launcher does for rank 0."""

    def end(self, names: Sequence[str]) -> None:
        """Kill these engines."""

    def start(self) -> None:
        """Fill the slots that have no engine."""


class SimTrainer:
    """See the module. `published(version)` is told before engines may ask for it; `finished(outcome)` after each step. `processes`: of the
    reserved engines; None: none of them hangs.
    """

    def __init__(
        self,
        sim: Simulation,
        daemon: SimDaemon,
        scenario: Scenario,
        simulated_policy: SimulatedPolicy,
        published: Callable[[int], None],
        finished: Callable[[StepOutcome], None],
        processes: ReservedProcesses | None = None,
        run: str = RUN,
        owner: PeerIdentity = OWNER,
    ) -> None:
        self._processes, self._run, self._owner = processes, run, owner
        self._sim, self._daemon, self._scenario, self._simulated_policy = (
            sim,
            daemon,
            scenario,
            simulated_policy,
        )
        self._published, self._finished = published, finished
        self._reserved = simulated_policy.reserved and scenario.reserved_engines > 0
        self._conn = daemon.connect(self._heard)
        self._calls = 0
        self._fleet = Fleet(0, 0, 0, 0, 0)
        self._inbox: deque[GroupDone] = deque()
        self._asked = 0  # the last step that was submitted
        self._groups_of: dict[int, set[int]] = {}  # step -> ids of its groups that are not committed
        self._late: tuple[int, ...] = ()  # groups of the step before that this one trains
        self._submits: dict[int, int] = {}  # call -> the step that it submitted
        self._lengths: dict[int, Sequence[int]] = {}  # by group, of groups that came and are not committed
        #: Rewards take their time while a step is under way, as live. On policy a group counts as come once it has them.
        self._scores = scenario.max_off_policy_steps > 0 and scenario.reward_s > 0
        self._scoring: set[int] = set()  # ids of groups that wait for their rewards
        self._under: Under | None = None
        self._actions: deque[train_step.Action] = deque()
        self._computing = False
        self._since = sim.now  # since when it does what it does
        self._poke: Timer | None = None
        self._react_due = False
        self._version = 0
        self._progress: Trained | None = None
        self._order = 0  # number of the last SetReserved
        self._tell_due = False
        self.reserved_awake = False
        self.stopped = False
        #: Each time that the GPUs did nothing: reserved engines slept, and there was nothing to train.
        self.waits: list[float] = []
        self._waits_since: float | None = None
        self._awake_s, self._awake_since = 0.0, sim.now

    # ---------------------------------------------------------------- the daemon

    def open(self) -> None:
        """Open the run, publish its first weights, and begin the first step."""
        sc, spec = self._scenario, self._scenario.reserved
        context = sc.context_tokens or sc.prompt_tokens + sc.lengths.cap
        engine = EngineSpec(
            spec.model.name,
            "{}",
            "bfloat16",
            sc.max_batch,
            context,
            speculation="none" if spec.acceptance is None else "group",
            move_kv=sc.move_kv,
            adapter_rank=ADAPTER_RANK if sc.adapter_share else 0,
            shared=sc.share_engines,
        )
        harvest = self._simulated_policy.harvest
        self._call(
            OpenRun(
                PROTOCOL,
                self._run,
                0,
                "{}",
                engine,
                "",
                harvest,
                sc.max_engines,
                sc.harvested.gpus,
                0,
                "host",
                1,
                max_off_policy_steps=sc.max_off_policy_steps,
                on_new_version=sc.on_new_version,
                keeps_cache=sc.kv == "keep",
            )
        )
        self._publish()
        self._begin(1)
        self._ping()

    def _call(self, body: CallBody) -> None:
        self._calls += 1
        self._daemon.post(
            TrainerCalled(
                self._conn,
                self._owner,
                Call(self._calls, self._run, 0 if isinstance(body, OpenRun) else 1, body),
            )
        )

    def _ping(self) -> None:
        if not self.stopped:
            self._call(Ping(trained=self._progress))
            self._sim.after(PING_S, self._ping)

    def _tell(self) -> None:
        self._tell_due = False
        if not self.stopped:
            self._call(Ping(trained=self._progress))

    def _heard(self, message: Message, _lengths: Sequence[int]) -> None:
        match message:
            case GroupDone() as group:
                lengths = tuple(_lengths) or (0,) * len(group.samples)
                if self._scores:
                    self._scoring.add(group.group_id)
                    self._arrived(group, lengths)
                    self._sim.after(self._scenario.reward_s, lambda: self._scored(group))
                else:
                    self._sim.after(self._scenario.reward_s, lambda: self._arrived(group, lengths))
            case Fleet():
                self._fleet = message
                self._react_later()
            case Reply(id=call, body=Accepted(group_ids=ids)):
                self._groups_of[self._submits.pop(call)] = set(ids)
            case Reply(body=Deferred(groups=groups)):
                self._put_off(groups)
            case Reply(body=Denied() as denied):
                raise SimulationError(
                    f"the daemon refused a call of the trainer: {denied.reason}", denied.remedy
                )

    def _arrived(self, group: GroupDone, lengths: Sequence[int]) -> None:
        self._lengths[group.group_id] = lengths
        self._inbox.append(group)
        self._react_later()

    def _scored(self, group: GroupDone) -> None:
        """Its rewards are there: at once for a group of a later step, which waits in the inbox."""
        self._scoring.discard(group.group_id)
        under = self._under
        if under is not None and group in under.unscored:
            under.unscored.remove(group)
            under.scored.append(group)
            self._react_later()

    def _react_later(self) -> None:
        """React once to all that comes at one instant."""
        if not self._react_due:
            self._react_due = True
            self._sim.at(self._sim.now, self._react, priority=2)

    # ---------------------------------------------------------------- a step

    def _publish(self) -> None:
        self._version += 1
        self._published(self._version)
        nbytes = self._scenario.reserved.model.weight_bytes
        root, manifest = root_of(self._version), b""
        if self._scenario.adapter_share:
            manifest = _BASE if self._version == 1 else _ADAPTERS
        self._call(PublishVersion(self._version, self._version - 1, root, manifest, (_SOURCE,), nbytes))

    def _begin(self, step: int) -> None:
        sc = self._scenario
        prompt, sampling = zeros(sc.prompt_tokens), Sampling(sc.lengths.cap)
        self._since = self._sim.now
        while self._asked < step + sc.max_off_policy_steps:
            # Where groups may change steps, a prompt's index is its place in the data, as live.
            first = self._asked * sc.prompts if sc.on_late == "later" else 0
            groups = tuple(
                GroupSpec(first + index, prompt, sc.samples, sampling) for index in range(sc.prompts)
            )
            self._asked += 1
            self._submits[self._calls + 1] = self._asked  # the answer may be here before the call returns
            self._call(SubmitGroups(self._asked, self._version, "train", groups))
        session = StepSession(
            self._plan(), self._fleet, self._memory(), reserved_awake=self.reserved_awake, now=self._sim.now
        )
        self._under = Under(step, self._sim.now, self._fleet.harvested, session)
        self._late = ()
        self._actions.extend(session.first)
        self._act()

    def _plan(self) -> train_step.StepPlan:
        sc, simulated_policy = self._scenario, self._simulated_policy
        ranks = min(sc.trainer.ranks, sc.prompts)
        groups = sc.prompts + len(self._late)
        return train_step.StepPlan(
            groups * sc.samples,
            groups,
            simulated_policy.window,
            sc.wake_after_s,
            simulated_policy.harvest,
            self._reserved,
            ranks,
            sc.sleep_timeout_s,
            ahead=sc.max_off_policy_steps > 0,
        )

    def _react(self) -> None:
        """Hand the machine what has come, unless it is computing: then that waits."""
        self._react_due = False
        under = self._under
        if under is None or self._computing or self.stopped or self._sleeps(under):
            return
        self._idle_until_now(under)
        under.harvested = max(under.harvested, self._fleet.harvested)
        events = under.session.observe(self._fleet, self._memory())
        if under.scored:
            events.append(train_step.GroupsScored(len(under.scored)))
            under.ready.extend(under.scored)
            under.scored.clear()
        for group in [group for group in self._inbox if group.step == under.step]:
            self._inbox.remove(group)
            scoring = group.group_id in self._scoring
            (under.unscored if scoring else under.ready).append(group)
            under.done.append(group)
            events.append(train_step.GroupsCompleted(1, len(group.samples), scoring=int(scoring)))
        if self._scores:
            self._report(under)
        self._feed(under, events or [train_step.StepTick()])
        self._act()
        self._ask_late(under)

    def _ask_late(self, under: Under) -> None:
        """As a live trainer: where all that came is trained, the next step may train what is late."""
        sc = self._scenario
        if sc.on_late != "later" or self._computing or self._under is not under or self.stopped:
            return
        if not under.session.state.waits_for_samples or self._sim.now < under.late_asked_at + LATE_AGAIN_S:
            return
        under.late_asked_at = self._sim.now
        missing = self._groups_of.get(under.step, set()) - {group.group_id for group in under.done}
        self._call(DeferLate(under.step, tuple(sorted(missing))))
        self._sim.after(LATE_AGAIN_S, self._react_later)

    def _put_off(self, groups: Sequence[int]) -> None:
        """These are of the next step now."""
        under = self._under
        if under is None or not groups:
            return
        self._groups_of[under.step] -= set(groups)
        self._groups_of.setdefault(under.step + 1, set()).update(groups)
        self._late = tuple(groups)
        self._feed(under, [train_step.GroupsDeferred(len(groups), len(groups) * self._scenario.samples)])
        if not self._computing:
            self._act()

    def _sleeps(self, under: Under) -> bool:
        return (
            self._simulated_policy.sleeps
            and under.session.state.phase is train_step.StepPhase.SEED
            and self._fleet.window == "open"
        )

    def _feed(self, under: Under, events: Sequence[train_step.Event]) -> None:
        for event in events:
            if under.session.finished:
                return
            actions = under.session.react(event, self._sim.now)
            self._actions.extend(actions)
            if any(isinstance(action, train_step.TrainReady) for action in actions):
                self._actions = deque(_last_train(self._actions))

    def _idle_until_now(self, under: Under) -> None:
        passed, self._since = self._sim.now - self._since, self._sim.now
        if self.reserved_awake:
            under.seconds.seed += passed
        else:
            under.seconds.wait += passed

    # ---------------------------------------------------------------- what it does

    def _act(self) -> None:
        """Perform the next action; computing takes time, and the one after it waits."""
        under = self._under
        assert under is not None
        while self._actions and not self._computing:
            action = self._actions.popleft()
            match action:
                case train_step.SleepReserved():
                    self._sleep(under)
                case train_step.WakeReserved():
                    self._set_reserved(True)
                    under.toggles["seconds_to_generating"] = self.wake_s
                    under.seconds.toggle += self.wake_s
                    under.seconds.seed -= self.wake_s
                case train_step.EndReserved():
                    self._end_engines(under, action)
                case train_step.TrainReady():
                    self._train(under)
                case train_step.FinishStep():
                    self._update(under)
        if not self._computing:
            self._poke_later(under.session.state)

    @property
    def wake_s(self) -> float:
        """Until reserved engines generate again."""
        return cost.to_generating_s(
            self._scenario.trainer, self._scenario.offload, self._scenario.reserved.gpus
        )

    def _end_engines(self, under: Under, action: train_step.EndReserved) -> None:
        """As a live rank 0: engines that have not given their memory back in time are ended, and the daemon is told once they are gone."""
        names = under.session.state.holding
        if self._processes is None or action.again or not names:
            raise SimulationError(
                f"reserved engines hold memory of the trainer's GPUs: {action.reason}",
                "give Scenario.hangs only to engines of the driver's own",
            )
        self._sim.after(STOP_S, lambda: self._ended(names, action.reason))

    def _ended(self, names: tuple[str, ...], reason: str) -> None:
        assert self._processes is not None
        self._processes.end(names)
        if not self.stopped:
            self._call(EndReserved(names, reason))
            if self.reserved_awake:  # woken meanwhile, when these still had their slots
                self._processes.start()

    def _set_reserved(self, awake: bool) -> None:
        if awake and self._processes is not None:
            self._processes.start()
        if awake:
            self._waited()
            self._awake_since = self._sim.now + self.wake_s
        elif self.reserved_awake:
            self._awake_s = self.awake_s
        self.reserved_awake = awake
        self._order += 1
        self._call(SetReserved(awake, self._order))

    @property
    def awake_s(self) -> float:
        """For how long reserved engines could generate."""
        return self._awake_s + self.reserved_awake * max(0.0, self._sim.now - self._awake_since)

    def _waited(self) -> None:
        """They are to do something again."""
        if self._waits_since is not None and self._sim.now > self._waits_since:
            self.waits.append(self._sim.now - self._waits_since)
        self._waits_since = None

    def _memory(self) -> reserved_memory.ReservedObservation | None:
        """What the daemon says of the engines that were told to sleep."""
        if not self._reserved or self.reserved_awake:
            return None
        return reserved_memory.observe(self._fleet, self._order, None, launched=False)

    def _sleep(self, under: Under) -> None:
        if under.window_end < 0:
            under.window_end = self._sim.now
        self._set_reserved(False)
        seconds = self._to_training_s()
        under.toggles["seconds_to_training"] = seconds
        under.seconds.toggle += seconds
        self._compute(seconds, lambda: self._slept(under))

    def _slept(self, under: Under) -> None:
        """The toggle's time is over: what engines acknowledged meanwhile is known. What came besides waits until what is due was begun."""
        self._feed(under, under.session.observe_memory(self._memory()))
        self._act()

    def _train(self, under: Under) -> None:
        groups, under.training = len(under.ready), list(under.ready)
        seconds = self._train_s(under)
        under.seconds.train += seconds
        under.rounds += 1
        self._compute(seconds, lambda: self._trained(under, groups))

    def _tokens_of(self, group: GroupDone) -> int:
        """Prompts included."""
        return self._scenario.prompt_tokens * len(group.samples) + sum(self._lengths[group.group_id])

    def _to_training_s(self) -> float:
        return cost.to_training_s(self._scenario.trainer, self._scenario.offload)

    def _train_s(self, under: Under) -> float:
        """Take all groups that wait: how long training them takes."""
        groups, under.ready = list(under.ready), deque()
        lengths = [
            self._scenario.prompt_tokens + length
            for group in groups
            for length in self._lengths[group.group_id]
        ]
        spec = self._scenario.trainer
        micro_steps = cost.pack(spec.model, lengths, spec.ranks, self._scenario.round_tokens)
        return sum(cost.micro_step_s(spec, by_rank) for by_rank in micro_steps)

    def _update_s(self) -> float:
        return cost.optimizer_s(self._scenario.trainer)

    def _publish_s(self) -> float:
        return cost.publish_s(self._scenario.trainer)

    def _trained(self, under: Under, groups: int) -> None:
        under.training, under.seconds.trained = [], under.seconds.train
        self._report(under)
        self._feed(under, [train_step.Trained(groups)])
        self._react_later()
        self._act()

    def _report(self, under: Under) -> None:
        """How far the step is: with the next ping."""
        waiting = {
            group.group_id for group in (*under.ready, *under.unscored, *under.scored, *under.training)
        }
        past = [self._tokens_of(group) for group in under.done if group.group_id not in waiting]
        progress = Trained(under.step, len(past), sum(past), under.seconds.trained)
        if self._scores:
            scored = len(under.done) - len(under.unscored)
            progress = msgspec.structs.replace(progress, scored=scored, reward_s=self._scenario.reward_s)
        if progress == self._progress:
            return
        self._progress = progress
        if not self._tell_due:
            self._tell_due = True
            self._sim.after(TELL_S, self._tell)

    def _update(self, under: Under) -> None:
        seconds = self._update_s()
        under.seconds.update += seconds
        self._compute(seconds, lambda: self._publish_next(under))

    def _publish_next(self, under: Under) -> None:
        seconds = self._publish_s()
        under.seconds.publish += seconds
        self._compute(seconds, lambda: self._commit(under))

    def _commit(self, under: Under) -> None:
        self._publish()
        seconds, tokens = under.seconds, sum(sum(self._lengths[group.group_id]) for group in under.done)
        outcomes = tuple(
            SampleOutcome(s.sample_id, "consumed", 0.0, 0.0) for group in under.done for s in group.samples
        )
        metrics = {
            "seconds": self._sim.now - under.start_s,
            "seconds_seed": seconds.seed + seconds.toggle,
            "seconds_wait": seconds.wait,
            "seconds_train": seconds.train,
            "rounds": float(under.rounds),
            "seconds_update": seconds.update,
            "seconds_publish": seconds.publish,
            "tokens": float(tokens),
        } | under.toggles
        self._call(CommitStep(under.step, self._version - 1, "train", outcomes, metrics))
        ages = [
            (under.step - 1 - of_step, count)
            for group in under.done
            for s in group.samples
            for _, of_step, count in s.versions
        ]
        aged = sum(count for _, count in ages)
        self._under = None
        self._groups_of.pop(under.step, None)
        for group in under.done:
            del self._lengths[group.group_id]
        self._finished(
            StepOutcome(
                under.step,
                under.start_s,
                self._sim.now,
                seconds.seed,
                seconds.toggle,
                seconds.wait,
                seconds.train,
                seconds.update,
                seconds.publish,
                under.window_end - under.start_s if under.window_end >= 0 else 0.0,
                tokens,
                len(outcomes),
                sum(s.moves for group in under.done for s in group.samples),
                under.harvested,
                sum(age * count for age, count in ages) / aged if aged else 0.0,
                max((age for age, _ in ages), default=0),
            )
        )
        if not self.stopped:
            self._begin(under.step + 1)

    def _compute(self, seconds: float, then: Callable[[], None]) -> None:
        self._computing = True
        self._waited()
        self._sim.after(seconds, lambda: self._computed(then))

    def _computed(self, then: Callable[[], None]) -> None:
        self._computing = False
        self._since = self._sim.now
        if not self.stopped:
            then()
            if not self._computing and not self.reserved_awake:
                self._waits_since = self._sim.now
            if self._inbox:  # what came meanwhile: no other message may follow
                self._react_later()

    def _poke_later(self, machine: train_step.StepState) -> None:
        """The machine waits for nothing but time: tell it when that has passed."""
        if self._poke is not None:
            self._poke.cancel()
            self._poke = None
        waits = [
            at + machine.plan.wake_after_s for at in (machine.gone_at, machine.back_at) if at is not None
        ]
        if machine.phase is train_step.StepPhase.SLEEP:
            limit = train_step.END_TIMEOUT_S if machine.end_attempts else machine.plan.sleep_timeout_s
            waits.append(machine.sleep_asked_at + limit)
        due = min((at for at in waits if at > self._sim.now), default=None)
        if due is not None and machine.phase is not train_step.StepPhase.FINISH:
            self._poke = self._sim.at(due, self._react_later)


def _last_train(actions: deque[train_step.Action]) -> list[train_step.Action]:
    """Several rounds that became due at one instant are one round over all groups that wait."""
    trains = [index for index, action in enumerate(actions) if isinstance(action, train_step.TrainReady)]
    return [action for index, action in enumerate(actions) if index not in trains[1:]]
