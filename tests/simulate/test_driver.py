"""A whole run in virtual time: closed forms, conservation, preemption, and the same code as live."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.baselines.polyrl import POLYRL
from benchmarks.baselines.registry import simulated_policy as policy_of
from benchmarks.baselines.rlboost import RLBOOST, rlboost
from benchmarks.baselines.rlboost import Settings as RLBoostSettings
from scavenger.errors import ConfigError, SimulationError
from scavenger.policy.interface import Standard
from scavenger.policy.predictive.policy import Predictive
from scavenger.policy.predictive.settings import PredictiveSettings
from scavenger.simulate import driver, presets
from scavenger.simulate import trainer_model as cost
from scavenger.simulate.clock import Simulation, Streams
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.driver import simulate
from scavenger.simulate.fleet import FleetTrace, from_deltas
from scavenger.simulate.lengths import Lognormal, Sampled
from scavenger.simulate.outcome import SimulationOutcome
from scavenger.simulate.policies import COLOCATED, DISAGGREGATED, OURS, Even, SimulatedPolicy, ours
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.sequences import EngineBatch, SimulatedRequest
from scavenger.simulate.site_daemon import SimDaemon
from scavenger.simulate.site_trainer import STOP_S, SimTrainer
from scavenger.simulate.startup import ColdStart, Deltas, StartupPhase
from scavenger.simulate.trainer_model import TrainerSpec

ENGINE = presets.engine("Qwen3-8B", "H100")
TRAINER = TrainerSpec(ENGINE.model, ENGINE.gpu, 8, 0.4, 100e9, 25e9, sleep_s=1.0, wake_s=2.0)
NOBODY = from_deltas("no idle GPUs", 1e7, {"a": 8}, {"a": 0}, [])
ALWAYS = from_deltas("always idle", 1e7, {"a": 8, "b": 8}, {"a": 8, "b": 8}, [])
SURE = ColdStart(StartupPhase(10.0), StartupPhase(5.0), StartupPhase(15.0), 1e12)
LENGTH, PROMPT = 2000, 512
EQUAL = Scenario(
    ENGINE,
    8,
    ENGINE,
    TRAINER,
    Sampled((LENGTH,), 4096),
    NOBODY,
    prompts=16,
    prompt_tokens=PROMPT,
    steps=3,
    cold_start=SURE,
    relay=False,
)
UNEVEN = replace(
    EQUAL,
    lengths=Lognormal.with_mean(1500, 0.9, 8192, 0.5),
    prompts=32,
    steps=3,
    fleet=ALWAYS,
    max_engines=8,
    max_batch=64,
)
EVENLY = SimulatedPolicy("evenly", Even, window=0.4)


def generation_s(spec: SimulatedEngine, samples: int) -> float:
    """One engine with whole groups of 8, all of one length, from prefill to end."""
    batch = EngineBatch(spec)
    batch.add([SimulatedRequest(i, i // 8, PROMPT, 0, LENGTH) for i in range(samples)], 0.0)
    while batch.size:
        ended = batch.next_time()
        batch.advance(ended)
    return ended


def training_s(scenario: Scenario) -> float:
    lengths = [PROMPT + LENGTH] * scenario.prompts * scenario.samples
    micro_steps = cost.pack(TRAINER.model, lengths, TRAINER.ranks, scenario.round_tokens)
    return (
        sum(cost.micro_step_s(TRAINER, ranks) for ranks in micro_steps)
        + cost.optimizer_s(TRAINER)
        + cost.publish_s(TRAINER)
    )


# ---------------------------------------------------------------- closed forms: alike engines, equal lengths, no preemption


def test_colocated_is_generation_then_training_with_both_toggles() -> None:
    out = simulate(EQUAL, COLOCATED)
    toggles = cost.to_generating_s(TRAINER, True) + cost.to_training_s(TRAINER, True)
    expected = toggles + generation_s(ENGINE, 16) + training_s(EQUAL)
    assert [step.seconds for step in out.steps] == pytest.approx([expected] * 3, rel=0.01)
    assert out.tokens_per_s == pytest.approx(16 * 8 * LENGTH / expected, rel=0.01)


def test_disaggregated_is_the_pull_and_generation_then_training() -> None:
    scenario = replace(EQUAL, fleet=ALWAYS, max_engines=8, max_batch=64)
    out = simulate(replace(scenario, steps=4), DISAGGREGATED)
    engines = 8
    pull = max(
        ENGINE.model.weight_bytes * engines / TRAINER.nic_bytes_s,
        ENGINE.model.weight_bytes / scenario.engine_bytes_s,
    )
    load = ENGINE.model.weight_bytes / ENGINE.gpu.host_bytes_s
    expected = pull + load + generation_s(ENGINE, 16) + training_s(EQUAL)
    assert out.steps[-1].harvested == engines
    assert out.steps[-1].seconds == pytest.approx(expected, rel=0.01)


def test_a_reward_that_takes_its_time_comes_after_generation() -> None:
    plain, late = (simulate(replace(EQUAL, reward_s=seconds), COLOCATED) for seconds in (0.0, 7.0))
    assert [step.seconds for step in late.steps] == pytest.approx(
        [step.seconds + 7.0 for step in plain.steps]
    )


def test_versions_after_the_first_are_pulled_as_deltas() -> None:
    """Eight engines share the trainer's interface: a version takes their sum of bytes over it, of which a delta is a tenth."""
    trainer = replace(TRAINER, nic_bytes_s=5e9)
    scenario = replace(
        EQUAL, fleet=ALWAYS, max_engines=8, max_batch=64, steps=4, trainer=trainer, engine_bytes_s=1e12
    )
    whole, deltas = (
        simulate(replace(scenario, deltas=one), DISAGGREGATED).steps[-1].seconds
        for one in (None, Deltas(0.1, 1))
    )
    assert whole - deltas == pytest.approx(0.9 * 8 * ENGINE.model.weight_bytes / 5e9, rel=0.01)


def test_pulls_begin_when_a_version_is_published_and_have_the_trainers_interface_for_themselves() -> None:
    """To publish is to copy and to hash: it takes its time, and nothing of the interface."""
    scenario = replace(EQUAL, fleet=ALWAYS, max_engines=8, max_batch=64, steps=4)
    hashing = replace(scenario, trainer=replace(TRAINER, hash_bytes_s=0.5e9))
    plain, hashed = (simulate(one, DISAGGREGATED).steps[-1] for one in (scenario, hashing))
    publish_s = cost.publish_s(hashing.trainer)
    assert publish_s > 3.0
    assert hashed.publish_s == pytest.approx(publish_s)
    assert hashed.seconds == pytest.approx(plain.seconds + publish_s)


def instant(scenario: Scenario) -> Scenario:
    """Toggles and weights take no time: a step is then generation over all engines, and training."""
    gpu = replace(ENGINE.gpu, host_bytes_s=1e18)
    engine = replace(ENGINE, gpu=gpu)
    trainer = replace(TRAINER, gpu=gpu, sleep_s=0.0, wake_s=0.0, nic_bytes_s=1e18)
    return replace(
        scenario,
        reserved=engine,
        harvested=engine,
        trainer=trainer,
        engine_bytes_s=1e18,
        fleet=ALWAYS,
        max_engines=8,
        max_batch=64,
    )


def test_rlboost_with_a_window_longer_than_generation_uses_all_engines_at_once() -> None:
    out = simulate(replace(instant(EQUAL), steps=4), rlboost(RLBoostSettings(first_s=1e4, eta=0.0)))
    assert out.steps[-1].harvested == 8
    assert out.steps[-1].seconds == pytest.approx(generation_s(ENGINE, 8) + training_s(EQUAL), rel=0.01)


@pytest.mark.parametrize("name", ["ours", "rlboost + our harvest", "ours + rlboost's window"])
def test_ours_and_the_mixtures_use_all_engines_to_the_end_of_generation(name: str) -> None:
    """Toggles are free and all answers end at once, so no window is better; rlboost's 30 s are longer than generation."""
    scenario = replace(instant(EQUAL), steps=6)
    out = simulate(scenario, policy_of(name, scenario))
    assert out.steps[-1].harvested == 8
    assert out.steps[-1].seconds == pytest.approx(generation_s(ENGINE, 8) + training_s(EQUAL), rel=0.01)


def test_the_clairvoyant_uses_all_engines_to_the_end_of_generation() -> None:
    """With as many slots as samples: else it gives ten each to thirteen engines, whose steps are hardly longer than eight's."""
    scenario = replace(instant(EQUAL), steps=4, max_batch=8)
    out = simulate(scenario, policy_of("clairvoyant", scenario))
    assert out.steps[-1].harvested == 8
    assert out.steps[-1].seconds == pytest.approx(generation_s(ENGINE, 8) + training_s(EQUAL), rel=0.01)


def test_polyrl_sleeps_its_window_to_the_end_though_all_has_come() -> None:
    out = simulate(replace(instant(EQUAL), steps=1), POLYRL)
    dispatch_s = (16 - 1) / 4
    assert dispatch_s + generation_s(ENGINE, 16) < 30.0
    assert out.steps[0].seconds == pytest.approx(30.0 + training_s(EQUAL), rel=0.01)


def test_polyrl_hands_out_four_groups_a_second() -> None:
    """As many groups as engines: the last begins when its turn comes, and is alone on its engine."""
    scenario = replace(instant(EQUAL), prompts=8, fleet=NOBODY, steps=1)
    out = simulate(scenario, replace(POLYRL, sleeps=False, harvest=False))
    assert out.steps[0].seed_s == pytest.approx((8 - 1) / 4 + generation_s(ENGINE, 8), rel=0.01)


def test_what_came_during_a_toggle_is_not_left_in_the_inbox() -> None:
    """The last group of a step and the last change of its fleet, while the trainer takes its state: no other message follows."""
    scenario = replace(
        UNEVEN,
        steps=0,
        horizon_s=600.0,
        max_engines=16,
        prompt_tokens=256,
        prompts=8,
        lengths=Lognormal.with_mean(2500, 1.3, 30_000, 0.1),
        cold_start=ColdStart(StartupPhase(2.0), StartupPhase(1.0), StartupPhase(2.0), 1e12),
        trainer=replace(TRAINER, sleep_s=5.0, wake_s=60.0),
    )
    out = simulate(scenario, ours(PredictiveSettings(price=0.0, least_saving=1e-4)))
    assert len(out.steps) > 2, "all of the second step's answers had come, and it never ended"


def test_a_step_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats go on for ever: that something happens proves nothing."""
    monkeypatch.setattr(driver, "STUCK_S", 100.0)
    with pytest.raises(SimulationError, match="step 1 has not ended at 105 s, begun at 0 s"):
        simulate(replace(EQUAL, reserved_engines=1, steps=1), replace(DISAGGREGATED, harvest=False))


def test_rlboost_corrects_its_window_by_a_third_of_the_waits_difference() -> None:
    """A window of 5 s (the floor) is too short: training waits; after the step it is 5 + wait/3."""
    scenario = replace(instant(UNEVEN), steps=4)
    out = simulate(scenario, rlboost(RLBoostSettings(first_s=5.0, memo=False)))
    waited = [step.wait_s for step in out.steps]
    assert waited[0] > 10.0
    remote_idle_s = out.steps[1].start_s - out.steps[0].end_s + out.steps[0].update_s + out.steps[0].publish_s
    assert out.steps[1].window_s == pytest.approx(5.0 + (waited[0] - remote_idle_s) / 3, abs=2.0)


# ---------------------------------------------------------------- what must hold


def held_never_exceeds_idle(out: SimulationOutcome) -> bool:
    return all(held <= idle for _, held, idle in out.levels)


def coming_and_going(seed: int, end_s: float = 3000.0) -> FleetTrace:
    """On four nodes, every few seconds the idle GPUs of one become some other number."""
    stream = Streams(seed).stream("coming and going")
    deltas, idle = [], dict.fromkeys("abcd", 4)
    for tick in range(1, int(end_s / 5)):
        node = "abcd"[int(stream.integers(4))]
        to = int(stream.integers(9))
        deltas.append((tick * 5.0, node, to - idle[node]))
        idle[node] = to
    return from_deltas("coming and going", end_s, dict.fromkeys("abcd", 8), dict.fromkeys("abcd", 4), deltas)


@pytest.mark.parametrize(
    "simulated_policy", [DISAGGREGATED, EVENLY, RLBOOST, POLYRL, OURS], ids=lambda c: c.name
)
def test_preempted_engines_lose_no_sample_and_ours_never_hold_what_others_need(
    simulated_policy: SimulatedPolicy,
) -> None:
    scenario = replace(UNEVEN, fleet=coming_and_going(1), max_engines=16, max_batch=32)
    out = simulate(scenario, simulated_policy)
    assert out.preemptions >= 5
    assert held_never_exceeds_idle(out)
    assert [step.samples for step in out.steps] == [256] * 3
    truth = [
        sum(sum(scenario.lengths.group(Streams(0), step, prompt, 8)) for prompt in range(32))
        for step in (1, 2, 3)
    ]
    assert [step.tokens for step in out.steps] == truth
    assert out.recorded == out.generated - out.regenerated
    assert (out.regenerated > 0) == simulated_policy.whole_groups, "only what moves as a group is cut"


def test_the_core_is_consistent_after_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = SimDaemon._handle

    def checked(self, event):  # type: ignore[no-untyped-def]
        handle(self, event)
        self.router.check()

    monkeypatch.setattr(SimDaemon, "_handle", checked)
    simulated_policy = rlboost(RLBoostSettings(batch=4))  # moves much
    out = simulate(
        replace(UNEVEN, steps=2, fleet=coming_and_going(2), max_engines=6, max_batch=32), simulated_policy
    )
    assert out.decisions["rebalance"] > 0


def test_equal_seeds_give_equal_outcomes_and_other_seeds_others() -> None:
    scenario = replace(UNEVEN, fleet=coming_and_going(3), cold_start=presets.WARM_CACHE, steps=2)
    assert simulate(scenario, RLBOOST) == simulate(scenario, RLBOOST)
    assert simulate(scenario, RLBOOST).steps != simulate(replace(scenario, seed=1), RLBOOST).steps


def test_a_fleet_that_vanishes_leaves_the_step_to_the_reserved_engines() -> None:
    gone = from_deltas("gone after a minute", 1e6, {"a": 8}, {"a": 8}, [(70.0, "a", -8)])
    out = simulate(replace(UNEVEN, fleet=gone, steps=2), EVENLY)
    assert out.preemptions == 8 == len(out.engines)
    assert [step.samples for step in out.steps] == [256, 256]


def test_a_fleet_that_vanishes_after_the_window_closed_leaves_the_step_to_reserved_engines_that_wake() -> (
    None
):
    calm, gone = (from_deltas("gone", 1e6, {"a": 8}, {"a": 8}, [(at_s, "a", -8)]) for at_s in (1000.0, 130.0))
    usual, hit = (simulate(replace(UNEVEN, fleet=fleet, steps=2), OURS).steps[1] for fleet in (calm, gone))
    assert usual.start_s + usual.seed_s < 130.0 < usual.end_s, "closed by then"
    assert hit.samples == 256
    assert hit.seed_s > usual.seed_s
    assert hit.end_s > 130.0 + UNEVEN.wake_after_s


def test_a_horizon_ends_the_simulation_between_steps() -> None:
    out = simulate(replace(UNEVEN, steps=0, horizon_s=200.0), EVENLY)
    assert out.seconds == 200.0
    assert 0 < out.steps[-1].end_s <= 200.0
    assert {engine.why for engine in out.engines} == {"running"}
    assert out.tokens_per_s == pytest.approx(out.tokens / out.steps[-1].end_s)


def test_engines_cost_from_their_jobs_start_and_idle_holds_are_counted() -> None:
    out = simulate(replace(UNEVEN, steps=2), DISAGGREGATED)
    held = sum(engine.allocated_s for engine in out.engines)
    busy = sum(engine.busy_s for engine in out.engines)
    assert out.harvested_gpu_hours == pytest.approx(held / 3600)
    assert out.idle_allocated_gpu_hours == pytest.approx((held - busy) / 3600)
    assert out.dollars(2.0, 1.0) == pytest.approx(2 * out.reserved_gpu_hours + out.harvested_gpu_hours)
    assert all(engine.ready_s - engine.start_s >= 30.0 for engine in out.engines)


def test_answers_that_do_not_fit_an_engine_and_endless_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        replace(EQUAL, prompt_tokens=10_000_000)
    with pytest.raises(ConfigError, match="without an end"):
        replace(EQUAL, steps=0, horizon_s=math.inf)


def test_the_live_default_policy_runs_in_the_simulator_too() -> None:
    out = simulate(replace(UNEVEN, steps=2), SimulatedPolicy("standard", Standard, window=0.5))
    assert [step.samples for step in out.steps] == [256, 256]


def test_a_simulated_trainer_tells_what_a_round_costs() -> None:
    """As the live one does, in the same figures: the policy learns it by the same code."""
    made: list[Predictive] = []

    def ours() -> Predictive:
        made.append(Predictive("run"))
        return made[-1]

    dear = replace(
        UNEVEN, trainer=replace(TRAINER, overhead_s=3.0), round_tokens=10**7, steps=6
    )  # a round is one micro-step
    simulate(dear, replace(OURS, new_policy=ours))
    costs = made[0].forecast.costs(made[0].forecast.curve("harvested", 1), 1, TRAINER.ranks)
    assert costs.round_s == pytest.approx(3.0, rel=0.15)


def test_an_engine_that_hangs_when_it_is_to_sleep_is_ended_at_its_deadline_and_its_samples_go_on_elsewhere() -> (
    None
):
    """The live rule: nothing is trained until every engine's memory is free, and a late one is ended."""
    late = replace(UNEVEN, hangs=(("0", 1),))
    plain, hung = simulate(UNEVEN, EVENLY), simulate(late, EVENLY)
    samples = UNEVEN.prompts * UNEVEN.samples
    assert [step.samples for step in hung.steps] == [samples] * 3, "none is lost"
    free_s = hung.steps[0].window_s + late.sleep_timeout_s + STOP_S
    assert plain.steps[0].seconds < free_s < hung.steps[0].seconds, "nothing is trained before"
    assert (plain.regenerated, hung.regenerated > 0) == (0, True), "what it had not handed over is made again"
    assert simulate(late, EVENLY) == hung
    again = replace(late, hangs=tuple((str(slot), 1) for slot in range(UNEVEN.reserved_engines)))
    assert [step.samples for step in simulate(again, EVENLY).steps] == [samples] * 3, "all at once"


def test_a_job_without_any_other_engine_goes_on_after_all_of_its_own_hung() -> None:
    everyone = replace(EQUAL, hangs=tuple((str(slot), 1) for slot in range(EQUAL.reserved_engines)))
    plain, hung = simulate(EQUAL, COLOCATED), simulate(everyone, COLOCATED)
    assert [step.samples for step in hung.steps] == [step.samples for step in plain.steps]
    assert hung.steps[0].seconds == pytest.approx(plain.steps[0].seconds + 60.0 + 5.0, abs=15.0)


class Slots:
    """`site_trainer.ReservedProcesses` of a job with two engines."""

    def __init__(self) -> None:
        self.running = ["a", "b"]
        self.starts = 0

    def end(self, names: Sequence[str]) -> None:
        self.running = [name for name in self.running if name not in names]

    def start(self) -> None:
        while len(self.running) < 2:
            self.starts += 1
            self.running.append(f"new {self.starts}")


@pytest.mark.parametrize(
    ("awake", "stopped", "running"),
    [(True, False, ["b", "new 1"]), (False, False, ["b"]), (True, True, ["b"])],
)
def test_an_engine_that_is_killed_after_a_wake_leaves_its_slot_to_another(
    awake: bool, stopped: bool, running: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimDaemon, "post", lambda _daemon, _event: None)
    sim, slots = Simulation(), Slots()
    daemon = SimDaemon(sim, lambda _run: Even(), EQUAL.tick_s, EQUAL.heartbeat_s)
    trainer = SimTrainer(sim, daemon, EQUAL, EVENLY, lambda _: None, lambda _: None, slots)
    trainer._set_reserved(awake)
    assert slots.running == ["a", "b"], "it is killed only after some seconds"
    trainer.stopped = stopped
    trainer._ended(("a",), "it did not sleep in time")
    assert slots.running == running
