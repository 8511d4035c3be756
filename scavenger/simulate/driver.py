"""Runs one training run on one site in virtual time, with the code that runs live: the router's core, its policy, the harvest policy.

    fleet --> VirtualSlurm --starts, preempts--> SimEngine <--messages--> Daemon(Router) <--messages--> SimTrainer(phases)
                  ^--commands-- SimHarvester(HarvestSession) --demand, JobGone-----'

Wires the parts and adds up. Decides nothing; every random draw comes from the scenario's seed by name, so policies meet the same world.

Boundary: virtual time; the loop that owns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scavenger.errors import SimulationError
from scavenger.protocol.messages import SampleKey
from scavenger.router.core.events import PeerIdentity
from scavenger.simulate import trainer_model as cost
from scavenger.simulate.clock import Simulation, Streams
from scavenger.simulate.network import Network
from scavenger.simulate.outcome import SimulationOutcome, StepOutcome
from scavenger.simulate.policies import SimulatedPolicy
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.site_cluster import SimHarvester, VirtualSlurm
from scavenger.simulate.site_daemon import SimDaemon
from scavenger.simulate.site_engine import SimEngine, WeightDelays
from scavenger.simulate.site_trainer import OWNER, RUN, SimTrainer
from scavenger.simulate.startup import pull_cost

#: A step that takes longer, where no time is set for the play to end, never ends: heartbeats and ticks alone would go on for ever.
STUCK_S = 86_400.0

Progress = Callable[[float, int], None]  # simulated seconds, finished steps


def simulate(
    scenario: Scenario, simulated_policy: SimulatedPolicy, progress: Progress | None = None
) -> SimulationOutcome:
    """What happens. Raises `SimulationError` when tokens went missing, or when nothing happens any more before the end."""
    return _SimulatedSite(scenario, simulated_policy, progress).run()


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


class _SimulatedSite:
    def __init__(
        self, scenario: Scenario, simulated_policy: SimulatedPolicy, progress: Progress | None
    ) -> None:
        self._scenario, self._simulated_policy, self._progress = scenario, simulated_policy, progress
        self._sim = Simulation()
        self._streams = Streams(scenario.seed)
        self._truth = _Truth(scenario)
        self._daemon = SimDaemon(
            self._sim, simulated_policy.new_policy(), scenario.tick_s, scenario.heartbeat_s
        )
        self._network = Network(
            self._sim, scenario.trainer.nic_bytes_s, scenario.engine_bytes_s, scenario.relay
        )
        self._versions: dict[int, int] = {}  # engine's connection -> the version that it has
        self._newest = 0
        self._trainer = SimTrainer(
            self._sim, self._daemon, scenario, simulated_policy, self._published, self._step_done, self
        )
        self._slurm = VirtualSlurm(
            self._sim, scenario.fleet, self._start_harvested, scenario.schedule_s, scenario.requeue_s
        )
        self._harvester = SimHarvester(
            self._sim, self._daemon, self._slurm, scenario.max_engines, simulated_policy.start_benefits
        )
        self._reserved: list[SimEngine] = []
        self._lives: dict[int, int] = {}  # slot -> reserved engines that it has had
        self._gone: list[SimEngine] = []
        self._steps: list[StepOutcome] = []

    def run(self) -> SimulationOutcome:
        scenario, sim = self._scenario, self._sim
        self._trainer.open()
        if self._simulated_policy.reserved:
            for number in range(scenario.reserved_engines):
                self._start_reserved(number)
        if self._simulated_policy.harvest:
            self._observe()
        self._beat()
        horizon_s, trainer = scenario.horizon_s, self._trainer
        while not trainer.stopped and sim.next_time() <= horizon_s:
            since = self._steps[-1].end_s if self._steps else 0.0
            if not sim.step() or (horizon_s == math.inf and sim.now > since + STUCK_S):
                raise SimulationError(
                    f"step {len(self._steps) + 1} has not ended at {sim.now:g} s, begun at {since:g} s"
                )
        sim.now = min(sim.now, scenario.horizon_s)
        return self._close()

    def _step_done(self, outcome: StepOutcome) -> None:
        self._steps.append(outcome)
        if self._scenario.steps and len(self._steps) >= self._scenario.steps:
            self._trainer.stopped = True
        if self._progress is not None:
            self._progress(self._sim.now, len(self._steps))

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
            WeightDelays(0.0, self._trainer.wake_s),
            self._truth,
            self._fetch,
            self._gone.append,
            kind="reserved",
            node=f"reserved-{number:02}",
            identity=OWNER,
            run=RUN,
            incarnation=life,
            slot=str(number),
            whole_groups=self._simulated_policy.whole_groups,
            hangs_at=0 if life else dict(scenario.hangs).get(str(number), 0),
        )
        self._reserved.append(engine)
        engine.register(self._sim.now + self._trainer.wake_s)

    def end(self, names: Sequence[str]) -> None:
        """`site_trainer.ReservedProcesses`."""
        for engine in [engine for engine in self._reserved if engine.name in names]:
            self._reserved.remove(engine)
            engine.shut_down("ended by its launcher", notice=False)

    def start(self) -> None:
        """`site_trainer.ReservedProcesses`."""
        there = {engine.slot for engine in self._reserved}
        for number in self._lives:
            if str(number) not in there:
                self._start_reserved(number)

    def _start_harvested(self, number: int, intent_id: str, incarnation: int, node: str) -> SimEngine:
        scenario, spec = self._scenario, self._scenario.harvested
        identity = PeerIdentity("worker", f"key-{intent_id}", RUN, intent_id)
        load_s = spec.model.weight_bytes / spec.gpus / spec.gpu.host_bytes_s
        engine = SimEngine(
            self._sim,
            self._daemon,
            spec,
            WeightDelays(load_s),
            self._truth,
            self._fetch,
            self._left,
            kind="harvested",
            node=node,
            identity=identity,
            run=RUN,
            incarnation=incarnation,
            whole_groups=self._simulated_policy.whole_groups,
        )
        # By job and incarnation: policies that start as many jobs meet the same cold starts, whatever nodes they get.
        draws = self._streams.stream("start", f"intent-{number:06}", incarnation)
        start = scenario.cold_start.draw(draws, 0.0)
        built_at = self._sim.now + start.total_s
        self._sim.after(start.container_s, lambda: engine.register(built_at) if engine.alive else None)
        return engine

    def _left(self, engine: SimEngine) -> None:
        self._gone.append(engine)
        self._network.cancel(engine.node + engine.identity.intent_id)
        if self._versions.pop(engine.conn, None) == self._newest:
            self._network.left_holder()
        self._slurm.left(engine)

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

    # ---------------------------------------------------------------- what goes on all the time

    def _beat(self) -> None:
        self._sim.after(self._scenario.heartbeat_s, self._beat, priority=3)
        for engine in (*self._reserved, *self._slurm.running):
            engine.beat()

    def _observe(self) -> None:
        self._sim.after(self._scenario.poll_interval_s, self._observe, priority=4)
        self._harvester.poll()

    # ---------------------------------------------------------------- the end

    def _close(self) -> SimulationOutcome:
        self._trainer.stopped = True
        everyone = [*self._reserved, *self._slurm.running, *self._gone]
        for engine in self._reserved:
            engine.close()
        self._slurm.close()
        generated = sum(engine.batch.decoded_tokens for engine in everyone)
        lost = sum(engine.lost for engine in everyone)
        recorded = self._daemon.recorded
        if generated != recorded + lost:
            raise SimulationError(f"{generated} tokens were generated, {recorded} recorded and {lost} lost")
        counters = self._daemon.router.core.counters
        end = (
            self._sim.now
            if math.isinf(self._scenario.horizon_s)
            else min(self._sim.now, self._scenario.horizon_s)
        )
        return SimulationOutcome(
            policy=self._simulated_policy.name,
            seconds=end,
            gpus_reserved=self._scenario.gpus_reserved,
            steps=tuple(self._steps),
            engines=tuple(self._slurm.engines),
            levels=tuple(self._slurm.levels),
            generated=generated,
            recorded=recorded,
            regenerated=lost,
            prefilled=sum(engine.batch.prefilled_tokens for engine in everyone),
            moves=sum(step.moves for step in self._steps),
            overflows=sum(engine.batch.preemptions for engine in everyone),
            events=self._sim.executed + self._daemon.handled,
            decisions={**self._daemon.decisions, "dropped": counters.get("advice_dropped", 0)},
        )
