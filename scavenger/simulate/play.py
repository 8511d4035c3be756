"""Plays a planned run over a fleet with the driver, and hands back what it came to in the terms of the comparison. Pure.

    Plan + Fleet --scenario_of--> Scenario --driver--> Outcome --played_of--> Played

Owns that translation. Decides nothing and knows no policy but by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from scavenger.errors import ConfigError
from scavenger.simulate.comparison import RunPolicy, SimulationResult, speed_up
from scavenger.simulate.decode import Efficiency, SimulatedEngine
from scavenger.simulate.driver import simulate
from scavenger.simulate.fleet import FleetTrace
from scavenger.simulate.outcome import SimulationOutcome
from scavenger.simulate.plan import RunAssumptions, SimulationPlan, assumptions
from scavenger.simulate.policies import SIMULATED_POLICIES, SimulatedPolicy
from scavenger.simulate.presets import COLD_CACHE, STACK, trainer_of
from scavenger.simulate.report import Series
from scavenger.simulate.scenario import ENGINE_BYTES_S, Scenario
from scavenger.simulate.survey.survey import Observed, Question, SpeedUp
from scavenger.simulate.trainer_model import state_bytes_per_gpu


def result_of(outcome: SimulationOutcome, fleet: FleetTrace, seed: int) -> SimulationResult:
    """One run's figures. Raises `ConfigError` when not one step ended: there is no throughput then."""
    if not outcome.steps:
        raise ConfigError(
            f"{outcome.policy}: no step ended within {outcome.seconds:.0f} s",
            "take a longer trace, or a smaller step (prompts, tokens)",
        )
    return SimulationResult(
        policy=outcome.policy,
        seed=seed,
        steps=len(outcome.steps),
        seconds=outcome.step_seconds,
        tokens=outcome.tokens,
        reserved_gpu_s=outcome.reserved_gpu_hours * 3600,
        harvested_gpu_s=outcome.harvested_gpu_hours * 3600,
        step_parts=(
            ("window", sum(step.seed_s for step in outcome.steps)),
            ("toggle", sum(step.toggle_s for step in outcome.steps)),
            ("wait", sum(step.wait_s for step in outcome.steps)),
            ("train", sum(step.train_s + step.update_s for step in outcome.steps)),
            ("publish", sum(step.publish_s for step in outcome.steps)),
        ),
        starts=outcome.starts,
        wasted=outcome.wasted_starts,
        preemptions=outcome.preemptions,
        moves=outcome.moves,
        regenerated_tokens=outcome.regenerated,
        owners=_owners(outcome, fleet),
    )


def _owners(outcome: SimulationOutcome, fleet: FleetTrace) -> Series:
    times = tuple(t_s for t_s, _, _ in outcome.levels)
    by_owner = (
        ("reserved", tuple(float(outcome.gpus_reserved) for _ in outcome.levels)),
        ("other users", tuple(float(fleet.gpus - idle) for _, _, idle in outcome.levels)),
        ("harvested", tuple(float(held) for _, held, _ in outcome.levels)),
        ("idle", tuple(float(idle - held) for _, held, idle in outcome.levels)),
    )
    return Series(outcome.policy, times, by_owner, outcome.seconds)


# The run of a site's question: the published points' prompts, completions and cap, played in a few windows over the whole period.
PROMPTS, SAMPLES, CAP, MAX_BATCH = 128, 8, 14_336, 256
WINDOWS, WINDOW_S = 3, 7200.0
OURS, ALONE = "ours", "colocated"

#: What is compared by default.
USUAL = (ALONE, "disaggregated", OURS)


def checked_policy_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names, checked. Raises `ConfigError` naming the known ones."""
    for name in names:
        if name not in SIMULATED_POLICIES:
            raise ConfigError(f"there is no policy {name!r}", f"choose among {', '.join(SIMULATED_POLICIES)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"the policies {', '.join(names) or '(none)'} cannot be compared", "name each once")
    return tuple(names)


def scenario_of(
    plan: SimulationPlan, fleet: FleetTrace, efficiency: Efficiency, steps: int, seed: int
) -> Scenario:
    """The run on the fleet, until `steps` are done (0: no limit) or the fleet ends."""
    engines, rest = divmod(plan.reserved_gpus, plan.gpus_per_engine)
    if rest:
        raise ConfigError(
            f"{plan.reserved_gpus} reserved GPUs are no whole engines of {plan.gpus_per_engine}",
            "give a multiple of run.gpus_per_engine",
        )
    training = plan.training
    efficiency = replace(efficiency, memory_share=training.memory_share)
    engine = SimulatedEngine(
        plan.model, plan.gpu, efficiency, plan.gpus_per_engine, max_sequences=plan.max_batch
    )
    stack = replace(STACK, recompute=training.recompute, forwards=training.forwards)
    trainer = trainer_of(plan.model, plan.gpu, plan.reserved_gpus, stack)
    return Scenario(
        reserved=engine,
        reserved_engines=engines,
        harvested=engine,
        trainer=trainer,
        lengths=plan.lengths,
        fleet=fleet,
        prompts=plan.prompts,
        samples=plan.samples,
        prompt_tokens=plan.prompt_tokens,
        steps=steps,
        horizon_s=fleet.end_s,
        max_engines=plan.most_engines,
        max_batch=plan.max_batch,
        cold_start=COLD_CACHE,
        offload=training.offloads(state_bytes_per_gpu(trainer), plan.gpu),
        round_tokens=training.round_tokens,
        wake_after_s=training.wake_after_s,
        sleep_timeout_s=training.sleep_timeout_s,
        seed=seed,
    )


def product_policy(name: str, _scenario: Scenario) -> SimulatedPolicy:
    """One of `SIMULATED_POLICIES`, whatever is simulated."""
    return SIMULATED_POLICIES[name]


def policy_runner(
    plan: SimulationPlan,
    fleet: FleetTrace,
    efficiency: Efficiency,
    steps: int = 0,
    policy_of: Callable[[str, Scenario], SimulatedPolicy] = product_policy,
) -> RunPolicy:
    """What plays the run with a named policy and a seed. A run that may not harvest plays every policy without harvested engines."""

    def run_policy(policy: str, seed: int, progress: Callable[[float], None]) -> SimulationResult:
        scenario = scenario_of(plan, fleet, efficiency, steps, seed)

        def shown(now_s: float, done: int) -> None:
            progress(max(now_s / fleet.end_s, done / steps if steps else 0.0))

        chosen = policy_of(policy, scenario)
        if not plan.most_engines:
            chosen = replace(chosen, harvest=False)
        return result_of(simulate(scenario, chosen, shown), fleet, seed)

    return run_policy


def assumed_of_machines(calibrated: bool) -> tuple[str, ...]:
    """What is assumed of engines and trainer: print it with every figure."""
    engines = (
        "engines as calibrated"
        if calibrated
        else "assumed: engines as fast as the presets say, which were not calibrated for this site"
    )
    trainer = (
        f"assumed: training reaches {STACK.training_compute:.0%} of the peak, "
        f"{STACK.trainer_bytes_s * 8 / 1e9:.0f} Gbps leave the trainer, "
        f"a toggle takes {STACK.sleep_s + STACK.wake_s:g} s beside its copies"
    )
    starts = (
        f"assumed: a cold start takes {COLD_CACHE.mean_s(0.0):.0f} s on average until weights are pulled, "
        f"at {ENGINE_BYTES_S * 8 / 1e9:g} Gbps an engine"
    )
    return engines, trainer, starts


def predict(observed: Observed, question: Question, reserved_gpus: int, policy: str = OURS) -> SpeedUp | str:
    """The expected speed-up of a run on `reserved_gpus` with `policy`, over generating on them alone; or why there is none.

    Played in up to `WINDOWS` windows spread evenly over the period, with other lengths in each; the interval is over the windows.
    """
    if policy not in SIMULATED_POLICIES:
        return f"the simulator has no policy {policy!r}"
    fleet = observed.fleet
    if reserved_gpus % question.spec.gpus:
        return f"{reserved_gpus} reserved GPUs are no whole engines of {question.spec.gpus}: give --reserved-gpus a multiple"
    if fleet.end_s < WINDOW_S:
        return (
            f"a run is played over {WINDOW_S / 3600:g} h at least, and this covers {fleet.end_s / 3600:.1f} h"
        )
    assumed = RunAssumptions(reserved_gpus)
    plan = _plan(question, assumed, fleet)
    count = min(WINDOWS, int(fleet.end_s / WINDOW_S))
    starts = [(fleet.end_s - WINDOW_S) * (index + 0.5) / count for index in range(count)]
    results = []
    for index, start_s in enumerate(starts):
        run_policy = policy_runner(plan, fleet.segment(start_s, WINDOW_S), question.spec.efficiency)
        results += [run_policy(name, index, lambda _share: None) for name in (ALONE, policy)]
    found = speed_up(results, policy, ALONE, f"{plan.summary()}; {count} windows of {WINDOW_S / 3600:g} h")
    return replace(found, notes=(*assumptions(plan, assumed), *assumed_of_machines(calibrated=False)))


def _plan(question: Question, assumed: RunAssumptions, fleet: FleetTrace) -> SimulationPlan:
    spec = question.spec
    most = fleet.gpus // spec.gpus if question.most is None else question.most
    return SimulationPlan(
        "site",
        spec.model,
        spec.gpu,
        assumed.reserved_gpus,
        spec.gpus,
        most,
        PROMPTS,
        SAMPLES,
        assumed.prompt_tokens,
        assumed.lengths(CAP),
        MAX_BATCH,
    )
