"""How long 72 h of an 856-GPU cluster with one training run on it take to simulate, on one core.

    python benchmarks/simulate.py [--trace earth_node_idle_72h.csv.gz] [--hours 72] [--policy rlboost] [--profile]

Without a trace the fleet is the synthetic one, whose statistics are near the trace's. The run: Qwen3-8B, 128 prompts x 8 completions of up
to 14K tokens a step, 8 reserved H100, engines of one GPU. Goal: at most 5 minutes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Not this file's folder: a benchmark in it has the name of a package.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place).resolve() != ROOT / "benchmarks")]

from benchmarks import synthetic  # noqa: E402  after the path, as all that follows
from benchmarks.baselines.registry import SIMULATED_POLICIES, simulated_policy  # noqa: E402
from scavenger.simulate import presets, traces  # noqa: E402
from scavenger.simulate.clock import Streams  # noqa: E402
from scavenger.simulate.driver import simulate  # noqa: E402
from scavenger.simulate.fleet import FleetTrace  # noqa: E402
from scavenger.simulate.lengths import Lognormal  # noqa: E402
from scavenger.simulate.outcome import SimulationOutcome  # noqa: E402
from scavenger.simulate.scenario import Scenario  # noqa: E402
from scavenger.simulate.trainer_model import TrainerSpec  # noqa: E402

GOAL_S = 300.0


def scenario(fleet: FleetTrace) -> Scenario:
    engine = presets.engine("Qwen3-8B", "H100")
    trainer = TrainerSpec(engine.model, engine.gpu, 8, 0.4, 100e9, 25e9, sleep_s=1.0, wake_s=2.0)
    return Scenario(
        engine,
        8,
        engine,
        trainer,
        Lognormal.with_mean(4000, 0.9, 14_336, 0.5),
        fleet,
        horizon_s=fleet.end_s,
        max_engines=256,
        heartbeat_s=15.0,
        tick_s=10.0,
        poll_interval_s=10.0,
        max_batch=64,
    )


def summary(out: SimulationOutcome, fleet: FleetTrace, wall_s: float) -> str:
    steps, whole_s = len(out.steps), wall_s * 72 * 3600 / fleet.end_s
    return (
        f"{out.policy}: {fleet.end_s / 3600:g} h of {fleet.gpus} GPUs ({fleet.origin}), {steps} steps of {out.step_seconds / steps:.0f} s, "
        f"{out.tokens_per_s:,.0f} tok/s, {out.starts} engine starts, {out.preemptions} preemptions\n"
        f"  {wall_s:.1f} s of CPU, {out.events / wall_s:,.0f} events/s; 72 h at this rate: {whole_s:.0f} s, goal {GOAL_S:.0f} s: "
        f"{'met' if whole_s <= GOAL_S else 'MISSED'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--hours", type=float, default=72.0)
    parser.add_argument("--policy", choices=sorted(SIMULATED_POLICIES), default="rlboost")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    end_s = asked.hours * 3600
    fleet = (
        traces.read_nodes(asked.trace, 8, 72 * 3600.0)
        if asked.trace
        else synthetic.generate(Streams(0), end_s)
    )
    fleet = fleet.segment(0.0, end_s) if fleet.end_s > end_s else fleet
    gc.freeze()
    gc.set_threshold(
        200_000, 20, 100
    )  # as `policies.work`: samples live for a step, and name no cycle that is not taken apart
    simulated = scenario(fleet)
    profile = cProfile.Profile() if asked.profile else None
    started = time.process_time()
    if profile is not None:
        out = profile.runcall(simulate, simulated, simulated_policy(asked.policy, simulated))
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    else:
        out = simulate(simulated, simulated_policy(asked.policy, simulated))
    print(summary(out, fleet, time.process_time() - started))


if __name__ == "__main__":
    main()
