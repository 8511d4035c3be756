"""Runs training runs on one site in virtual time, with the code that runs live: the router's core, its policy, the harvest policy.

    fleet --> VirtualSlurm --starts, preempts--> SimEngine <--messages--> Daemon(Router) <--messages--> SimTrainer(phases)
                  ^--commands-- SimHarvester(HarvestSession) --demand, JobGone-----'

Several runs share fleet, Slurm, daemon and harvester (`simulate_fleet`); each has its trainer, its links, its lengths and its policy.
Wires the parts and adds up. Decides nothing; every random draw comes from the scenario's seed by name, so policies meet the same world.

Boundary: virtual time; the loop that owns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scavenger.errors import ConfigError, SimulationError
from scavenger.harvest.decide.lending import lent
from scavenger.protocol.messages import LendSlots, SampleKey
from scavenger.router.core.events import PeerIdentity
from scavenger.simulate import trainer_model as cost
from scavenger.simulate.clock import Simulation, Streams
from scavenger.simulate.kv import KvTransfers
from scavenger.simulate.network import Network
from scavenger.simulate.outcome import KvOutcome, ReservedOutcome, SimulationOutcome, StepOutcome
from scavenger.simulate.policies import SimulatedPolicy
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.site_cluster import SimHarvester, SimulatedDivision, VirtualSlurm
from scavenger.simulate.site_daemon import SimDaemon
from scavenger.simulate.site_engine import BorrowedSlots, SimEngine, WeightDelays
from scavenger.simulate.site_trainer import RUN, SimTrainer
from scavenger.simulate.startup import pull_cost

#: A step that takes longer, where no time is set for the play to end, never ends: heartbeats and ticks alone would go on for ever.
STUCK_S = 86_400.0

Progress = Callable[[float, int], None]  # simulated seconds, finished steps


def simulate(
    scenario: Scenario, simulated_policy: SimulatedPolicy, progress: Progress | None = None
) -> SimulationOutcome:
    """What happens. Raises `SimulationError` when tokens went missing, or when nothing happens any more before the end."""
    return _SimulatedSite([SimulatedRun(RUN, scenario, simulated_policy)], None, progress).run()[0]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One run of several: its `owner`, and when it comes (s). The site's part of the scenario (fleet, Slurm's delays, heartbeats, horizon)
    is the first run's."""

    name: str
    scenario: Scenario
    policy: SimulatedPolicy
    owner: str = "owner"
    comes_s: float = 0.0


def simulate_fleet(
    runs: Sequence[SimulatedRun], division: SimulatedDivision, progress: Progress | None = None
) -> list[SimulationOutcome]:
    """What happens to several runs that share one fleet, each over its own time: an outcome's `tokens_per_s` counts from the run's coming.

    Raises as `simulate` does. `generated`, `recorded`, `levels` and `events` of each outcome are the whole site's.
    """
    names = [run.name for run in runs]
    if not runs or len(set(names)) < len(names):
        raise ConfigError(f"runs named {', '.join(names) or '(none)'}", "give each run a name of its own")
    return _SimulatedSite(runs, division, progress).run()


class _Truth:
    """Completion lengths by sample, drawn when a prompt is first asked for."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._streams = scenario, Streams(scenario.seed)
        self._groups: dict[tuple[int, int], tuple[int, ...]] = {}  # by step and prompt

    def __call__(self, key: SampleKey) -> int:
        scenario = self._scenario
        step, prompt = key.step, key.prompt
        if (
            scenario.on_late == "later"
        ):  # a late group is of another step than it was asked for: its index says which
            step, prompt = 1 + key.prompt // scenario.prompts, key.prompt % scenario.prompts
        group = self._groups.get((step, prompt))
        if group is None:
            group = scenario.lengths.group(self._streams, step, prompt, scenario.samples)
            self._groups[step, prompt] = group
            over = step - scenario.max_off_policy_steps - 1
            if len(self._groups) > (scenario.max_off_policy_steps + 3) * scenario.prompts:
                self._groups = {of: lengths for of, lengths in self._groups.items() if of[0] >= over}
        return group[key.index]


class _RunOnSite:
    """One run: its trainer, reserved engines, links and what came of its steps. `ReservedProcesses` for its trainer."""

    def __init__(self, site: _SimulatedSite, run: SimulatedRun) -> None:
        self._site, self._scenario, self._policy = site, run.scenario, run.policy
        self._sim, self._daemon, self.spec = site.sim, site.daemon, run
        self._identity = PeerIdentity("owner", run.owner)
        self._truth = _Truth(run.scenario)
        scenario = run.scenario
        self._network = Network(
            self._sim, scenario.trainer.nic_bytes_s, scenario.engine_bytes_s, scenario.relay
        )
        self._kv = (
            KvTransfers(scenario.kv_bytes_s, scenario.harvested.gpu.host_bytes_s)
            if scenario.move_kv
            else None
        )
        self._versions: dict[int, int] = {}  # engine's connection -> the version that it has
        self._newest = 0
        self.trainer = SimTrainer(
            self._sim,
            self._daemon,
            scenario,
            run.policy,
            self._published,
            self._step_done,
            self,
            run.name,
            self._identity,
        )
        self.reserved: list[SimEngine] = []
        self._lives: dict[int, int] = {}  # slot -> reserved engines that it has had
        self.gone: list[SimEngine] = []
        self.borrowers: list[
            SimEngine
        ] = []  # workers in slots of other runs' engines, those that left included
        self.steps: list[StepOutcome] = []

    def open(self) -> None:
        self.trainer.open()
        if self._policy.reserved:
            for number in range(self._scenario.reserved_engines):
                self._start_reserved(number)

    def _step_done(self, outcome: StepOutcome) -> None:
        self.steps.append(outcome)
        if self._scenario.steps and len(self.steps) >= self._scenario.steps:
            self.trainer.stopped = True
        self._site.step_done()

    # ---------------------------------------------------------------- engines

    def _start_reserved(self, number: int) -> None:
        scenario = self._scenario
        spec = scenario.reserved
        if not scenario.offload:
            spec = spec.with_resident(cost.state_bytes_per_gpu(scenario.trainer))
        life = self._lives.get(number, 0)
        self._lives[number] = life + 1
        engine = SimEngine(
            self._sim,
            self._daemon,
            spec,
            WeightDelays(0.0, self.trainer.wake_s),
            self._truth,
            self._fetch,
            self.gone.append,
            kind="reserved",
            node=f"reserved-{number:02}"
            if self.spec.name == RUN
            else f"reserved-{self.spec.name}-{number:02}",
            identity=self._identity,
            run=self.spec.name,
            incarnation=life,
            slot=str(number),
            whole_groups=self._policy.whole_groups,
            hangs_at=0 if life else dict(scenario.hangs).get(str(number), 0),
            kv=self._kv,
        )
        self.reserved.append(engine)
        engine.register(self._sim.now + self.trainer.wake_s)

    def end(self, names: Sequence[str]) -> None:
        """`site_trainer.ReservedProcesses`."""
        for engine in [engine for engine in self.reserved if engine.name in names]:
            self.reserved.remove(engine)
            engine.shut_down("ended by its launcher", notice=False)

    def start(self) -> None:
        """`site_trainer.ReservedProcesses`."""
        there = {engine.slot for engine in self.reserved}
        for number in self._lives:
            if str(number) not in there:
                self._start_reserved(number)

    def start_harvested(
        self, number: int, intent_id: str, incarnation: int, node: str, forget_s: float | None
    ) -> SimEngine:
        scenario, spec = self._scenario, self._scenario.harvested
        identity = PeerIdentity("worker", f"key-{intent_id}", self.spec.name, intent_id)
        engine = SimEngine(
            self._sim,
            self._daemon,
            spec,
            self._load(),
            self._truth,
            self._fetch,
            self._left,
            kind="harvested",
            node=node,
            identity=identity,
            run=self.spec.name,
            incarnation=incarnation,
            whole_groups=self._policy.whole_groups,
            kv=self._kv,
            lend=self._site.lend,
        )
        # By job and incarnation: policies that start as many jobs meet the same cold starts, whatever nodes they get.
        if forget_s is not None:
            warm_at = self._sim.now + forget_s
            self._sim.at(warm_at, lambda: engine.register(warm_at) if engine.alive else None)
            return engine
        draws = self._site.streams.stream("start", f"intent-{number:06}", incarnation)
        start = scenario.cold_start.draw(draws, 0.0)
        built_at = self._sim.now + start.total_s
        self._sim.after(start.container_s, lambda: engine.register(built_at) if engine.alive else None)
        return engine

    def _load(self) -> WeightDelays:
        spec, adapters = self._scenario.harvested, self._scenario.adapter_share
        load_s = spec.model.weight_bytes / spec.gpus / spec.gpu.host_bytes_s
        return WeightDelays(load_s, again_s=load_s * adapters if adapters else None)

    def borrow(self, lender: SimEngine, slots: int) -> SimEngine:
        """A worker of this run in slots of another run's engine. It pulls base and adapters as any other does."""
        number = len(self.borrowers) + 1
        intent_id = lent(lender.identity.intent_id)
        engine = SimEngine(
            self._sim,
            self._daemon,
            lender.spec,
            self._load(),
            self._truth,
            self._fetch,
            lambda engine: self._borrower_left(engine, lender),
            kind="harvested",
            node=lender.node,
            identity=PeerIdentity("worker", f"key-{self.spec.name}-lent-{number}", self.spec.name, intent_id),
            run=self.spec.name,
            incarnation=number,
            borrows=BorrowedSlots(slots, lender.begin_loan().borrower),
        )
        self.borrowers.append(engine)
        engine.register(self._sim.now)
        return engine

    def _borrower_left(self, engine: SimEngine, lender: SimEngine) -> None:
        self._stops_pulling(engine)
        lender.loan_over()

    def _stops_pulling(self, engine: SimEngine) -> None:
        self._network.cancel(engine.node + engine.identity.intent_id)
        if self._versions.pop(engine.conn, None) == self._newest:
            self._network.left_holder()

    def _left(self, engine: SimEngine) -> None:
        self.gone.append(engine)
        self._stops_pulling(engine)
        self._site.slurm.left(engine)

    def _published(self, version: int) -> None:
        self._newest = version
        self._network.new_version()

    def _fetch(self, engine: SimEngine, version: int, done: Callable[[], None]) -> None:
        """Reserved engines have the weights on their own GPUs: what it takes to load them is part of their waking."""
        if engine.kind == "reserved":
            self._sim.at(self._sim.now, done)
            return
        held = self._versions.pop(engine.conn, None)
        scenario = self._scenario
        link = min(scenario.engine_bytes_s, scenario.trainer.nic_bytes_s)
        nbytes, apply_s = pull_cost(engine.spec.model.weight_bytes, version, held, scenario.deltas, link)
        if scenario.adapter_share and held is not None:
            nbytes, apply_s = engine.spec.model.weight_bytes * scenario.adapter_share, 0.0
        least = self._sim.now + apply_s  # chunks are applied as they come

        def arrived() -> None:
            if self._sim.now < least:
                self._sim.at(least, complete)
            else:
                complete()

        def complete() -> None:
            if engine.alive:
                self._versions[engine.conn] = version
                done()

        self._network.pull(engine.node + engine.identity.intent_id, nbytes, arrived)

    # ---------------------------------------------------------------- the end

    def close(self, seconds: float, recorded: int, generated: int) -> SimulationOutcome:
        """`recorded`, `generated`: tokens of all runs."""
        slurm, scenario = self._site.slurm, self._scenario
        everyone = [*self.reserved, *self.gone, *self.borrowers]
        counters = self._daemon.router.core.counters
        return SimulationOutcome(
            policy=self._policy.name,
            seconds=seconds,
            gpus_reserved=scenario.gpus_reserved,
            steps=tuple(self.steps),
            engines=tuple(engine for engine in slurm.engines if engine.run == self.spec.name),
            levels=tuple(slurm.levels),
            generated=generated,
            recorded=recorded,
            regenerated=sum(engine.lost for engine in everyone),
            prefilled=sum(engine.batch.prefilled_tokens for engine in everyone),
            moves=sum(step.moves for step in self.steps),
            overflows=sum(engine.batch.preemptions for engine in everyone),
            events=self._sim.executed + self._daemon.handled,
            decisions={**self._daemon.decisions, "dropped": counters.get("advice_dropped", 0)},
            since_s=self.spec.comes_s,
            prefill_s=sum(engine.batch.prefill_s for engine in everyone),
            kv=self._kv_outcome(),
            reserved=ReservedOutcome(
                scenario.gpus_reserved,
                scenario.reserved_engines,
                self.trainer.awake_s,
                sum(engine.busy_s for engine in everyone if engine.kind == "reserved"),
                tuple(self.trainer.waits),
            ),
            loans=len(self.borrowers),
            borrowed_tokens=sum(engine.tokens for engine in self.borrowers),
        )

    def _kv_outcome(self) -> KvOutcome | None:
        run = self._daemon.router.core.runs.get(self.spec.name)
        if self._kv is None or run is None:
            return None
        return KvOutcome(*(getattr(run.kv, name) for name in KvOutcome.__match_args__))


class _SimulatedSite:
    """What all runs share."""

    def __init__(
        self, runs: Sequence[SimulatedRun], division: SimulatedDivision | None, progress: Progress | None
    ) -> None:
        scenario = self._scenario = runs[0].scenario
        self._progress = progress
        self.sim = Simulation()
        self.streams = Streams(scenario.seed)
        policies = {run.name: run.policy for run in runs}
        self.daemon = SimDaemon(
            self.sim,
            lambda name: policies[name].new_policy(),
            scenario.tick_s,
            scenario.heartbeat_s,
            scenario.share_prompts,
        )
        self._runs = {run.name: _RunOnSite(self, run) for run in runs}
        self.slurm = VirtualSlurm(
            self.sim,
            scenario.fleet,
            self._start_harvested,
            scenario.schedule_s,
            scenario.requeue_s,
            division.forget_s if division is not None else 0.0,
        )
        self._harvest = any(run.policy.harvest for run in runs)
        self._harvester = SimHarvester(
            self.sim,
            self.daemon,
            self.slurm,
            scenario.max_engines if len(runs) == 1 else 0,
            any(run.policy.start_benefits for run in runs),
            division,
        )

    def run(self) -> list[SimulationOutcome]:
        scenario, sim = self._scenario, self.sim
        for run in self._runs.values():
            if run.spec.comes_s > 0:
                sim.at(run.spec.comes_s, run.open)
            else:
                run.open()
        if self._harvest:
            self._observe()
        self._beat()
        horizon_s = scenario.horizon_s
        while not all(run.trainer.stopped for run in self._runs.values()) and sim.next_time() <= horizon_s:
            since = max(run.steps[-1].end_s if run.steps else 0.0 for run in self._runs.values())
            if not sim.step() or (horizon_s == math.inf and sim.now > since + STUCK_S):
                done = min(len(run.steps) for run in self._runs.values())
                raise SimulationError(f"step {done + 1} has not ended at {sim.now:g} s, begun at {since:g} s")
        sim.now = min(sim.now, scenario.horizon_s)
        return self._close()

    def step_done(self) -> None:
        if self._progress is not None:
            self._progress(self.sim.now, sum(len(run.steps) for run in self._runs.values()))

    def _start_harvested(
        self, number: int, intent_id: str, incarnation: int, node: str, run: str, forget_s: float | None
    ) -> SimEngine:
        return self._runs[run].start_harvested(number, intent_id, incarnation, node, forget_s)

    def lend(self, lender: SimEngine, order: LendSlots) -> None:
        """Begin a loan of slots of an engine, once the one before is over; or only end that."""
        if lender.borrower is not None:
            lender.borrower.shut_down(order.reason)
        if order.slots and lender.alive:
            lender.borrower = self._runs[order.run].borrow(lender, order.slots)

    # ---------------------------------------------------------------- what goes on all the time

    def _beat(self) -> None:
        self.sim.after(self._scenario.heartbeat_s, self._beat, priority=3)
        for run in self._runs.values():
            for engine in run.reserved:
                engine.beat()
        for engine in self.slurm.running:
            engine.beat()

    def _observe(self) -> None:
        self.sim.after(self._scenario.poll_interval_s, self._observe, priority=4)
        self._harvester.poll()

    # ---------------------------------------------------------------- the end

    def _close(self) -> list[SimulationOutcome]:
        for run in self._runs.values():
            run.trainer.stopped = True
        everyone = [*self.slurm.running]
        for run in self._runs.values():
            everyone += [*run.reserved, *run.gone, *run.borrowers]
            for engine in run.reserved:
                engine.close()
        for engine in self.slurm.running:
            self._runs[engine.run].gone.append(engine)
        self.slurm.close()
        generated = sum(engine.batch.decoded_tokens for engine in everyone)
        lost = sum(engine.lost for engine in everyone)
        recorded = self.daemon.recorded
        if generated != recorded + lost:
            raise SimulationError(f"{generated} tokens were generated, {recorded} recorded and {lost} lost")
        end = (
            self.sim.now
            if math.isinf(self._scenario.horizon_s)
            else min(self.sim.now, self._scenario.horizon_s)
        )
        return [run.close(end, recorded, generated) for run in self._runs.values()]
