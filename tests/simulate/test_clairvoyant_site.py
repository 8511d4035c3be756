"""On a simulated site: the clairvoyant policy reads the true lengths, and no contender's step is shorter than the bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.baselines.clairvoyant.policy import OracleSchedule
from benchmarks.baselines.clairvoyant.site import SiteTruth, clairvoyant
from benchmarks.baselines.registry import KNOWN
from benchmarks.baselines.registry import simulated_policy as policy_of
from benchmarks.baselines.rlboost import RLBOOST
from benchmarks.oracle_site import SiteBound
from scavenger.policy.interface import SampleView, WorkerView
from scavenger.simulate import presets
from scavenger.simulate.driver import simulate
from scavenger.simulate.fleet import FleetChange, FleetTrace
from scavenger.simulate.lengths import Lognormal
from scavenger.simulate.policies import COLOCATED, DISAGGREGATED, OURS, SimulatedPolicy
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.trainer_model import TrainerSpec

H100 = presets.engine("Qwen3-8B", "H100")
TRAINER = TrainerSpec(
    H100.model, H100.gpu, 4, 0.4, 4e11, 25e9, overhead_s=0.2, sleep_s=1.0, wake_s=2.0, hash_bytes_s=4e9
)


def site(engines: int, changes: tuple[FleetChange, ...] = (), seed: int = 0) -> Scenario:
    capacity = {f"n{index}": 1 for index in range(max(1, engines))}
    fleet = FleetTrace("test", 1e6, capacity, {name: int(engines > 0) for name in capacity}, changes)
    lengths = Lognormal.with_mean(1500, 0.8, 6000, 0.5)
    return Scenario(
        H100,
        4,
        H100,
        TRAINER,
        lengths,
        fleet,
        prompts=24,
        samples=8,
        prompt_tokens=200,
        steps=4,
        seed=seed,
        max_engines=8,
    )


def simulated_policies(scenario: Scenario) -> list[SimulatedPolicy]:
    return [COLOCATED, DISAGGREGATED, RLBOOST, OURS, clairvoyant(scenario)]


@pytest.mark.parametrize("engines", [0, 2, 6])
def test_no_contenders_step_is_shorter_than_the_bound(
    engines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = site(engines)
    least = SiteBound(scenario)
    speeds = {}
    for simulated_policy in simulated_policies(scenario):
        if simulated_policy is DISAGGREGATED and not engines:
            continue
        out = simulate(scenario, simulated_policy)
        for step in out.steps:
            assert step.seconds >= least.of(step.step, step.start_s, step.end_s).total_s, (
                simulated_policy.name,
                step,
            )
        late = out.steps[1:]  # the first waits for engines that start
        speeds[simulated_policy.name] = sum(s.seconds for s in late) / sum(
            least.of(s.step, s.start_s, s.end_s).total_s for s in late
        )
    with capsys.disabled():
        print(
            f"\n{engines} engines, steps over the bound: "
            + ", ".join(f"{name} {ratio:.2f}" for name, ratio in speeds.items())
        )
    assert speeds["clairvoyant"] <= min(speeds.values()) * 1.02


@pytest.mark.parametrize(
    "name",
    [name for name in KNOWN if name not in {"colocated", "disaggregated", "rlboost", "ours", "clairvoyant"}],
)
def test_nor_is_a_mixture_s_or_an_ablation_s(name: str) -> None:
    scenario = replace(site(2), steps=3)
    least = SiteBound(scenario)
    for step in simulate(scenario, policy_of(name, scenario)).steps:
        assert step.seconds >= least.of(step.step, step.start_s, step.end_s).total_s, step


def test_on_a_fleet_that_comes_and_goes_no_step_is_shorter_than_the_bound() -> None:
    """Engines count while there is room for them, whoever has them; the k-th while k fit."""
    changes = tuple(
        FleetChange(50.0 * n, "n0", delta, int(delta > 0)) for n, delta in enumerate([-1, 1] * 40, 1)
    )
    scenario = site(3, changes)
    least, calm = SiteBound(scenario), SiteBound(site(3))
    for simulated_policy in (OURS, clairvoyant(scenario)):
        for step in simulate(scenario, simulated_policy).steps:
            found, more = (
                least.of(step.step, step.start_s, step.end_s),
                calm.of(step.step, step.start_s, step.end_s),
            )
            assert more.total_s <= found.total_s <= step.seconds, (simulated_policy.name, step)
            assert more.work_s <= found.work_s
    assert [engine.intervals for engine in least.harvested(60.0, 160.0)] == [
        ((0.0, math.inf),),
        ((0.0, math.inf),),
        ((40.0, 90.0),),
    ]


def test_the_truth_is_what_the_engines_generate() -> None:
    scenario = site(2)
    groups: set[int] = set()

    class Spy(SiteTruth):
        def length(self, sample: SampleView) -> int:
            groups.add(sample.group_id)
            known = super().length(sample)
            assert sample.length <= known
            assert not sample.done or sample.length == known
            return known

    out = simulate(scenario, replace(clairvoyant(scenario), new_policy=lambda: OracleSchedule(Spy(scenario))))
    assert {1, scenario.prompts, 2 * scenario.prompts, 4 * scenario.prompts} <= groups
    truth = SiteTruth(scenario)
    for step in out.steps:
        ids = range((step.step - 1) * scenario.prompts + 1, step.step * scenario.prompts + 1)
        samples = [
            SampleView(id=0, group_id=group, index=index, prompt_tokens=200, cap=6000)
            for group in ids
            for index in range(scenario.samples)
        ]
        assert step.tokens == sum(map(truth.length, samples))


def test_a_loss_is_known_beforehand() -> None:
    changes = (FleetChange(500.0, "n0", -1, 0), FleetChange(800.0, "n0", 1, 1))
    truth = SiteTruth(site(2, changes))

    def worker(node: str, joined_at: float, kind: str = "harvested") -> WorkerView:
        return WorkerView(
            id=1,
            kind=kind,
            node=node,
            gpus=1,
            status="ready",
            serves=True,
            leases=0,
            max_batch=64,
            joined_at=joined_at,
        )

    assert truth.lost_at(worker("n0", 10.0)) == 500.0
    assert math.isinf(truth.lost_at(worker("n0", 900.0)))
    assert math.isinf(truth.lost_at(worker("n1", 10.0)))
    assert math.isinf(truth.lost_at(worker("n0", 10.0, "reserved")))
