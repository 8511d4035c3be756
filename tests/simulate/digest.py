"""A simulation in one hash: every answer of its policy with its time and reason, and all that came out.

Two programs that decide the same have the same digest; the number of events handled is left out. To compare two trees on longer scenarios:

    PYTHONPATH=TREE python tests/simulate/digest.py [--trace FILE]
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from benchmarks.baselines.registry import SIMULATED_POLICIES
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.interface import (
    Fact,
    RouterPolicy,
    RunView,
    SampleMove,
    SamplePlacement,
    Weighs,
    WindowDecision,
)
from scavenger.simulate import presets, traces
from scavenger.simulate.clock import Streams
from scavenger.simulate.driver import simulate
from scavenger.simulate.fleet import FleetTrace, from_deltas
from scavenger.simulate.lengths import Lognormal
from scavenger.simulate.outcome import SimulationOutcome
from scavenger.simulate.policies import SimulatedPolicy
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.trainer_model import TrainerSpec

ENGINE = presets.engine("Qwen3-8B", "H100")
TRAINER = TrainerSpec(ENGINE.model, ENGINE.gpu, 8, 0.4, 100e9, 25e9, sleep_s=1.0, wake_s=2.0)


class Recorder:
    """A policy that is overheard. An answer counts when it says something new: how often it was asked for does not."""

    def __init__(self, policy: RouterPolicy, into: list[object]) -> None:
        self._policy, self._into = policy, into
        self._window: object = None
        self._engines: object = None

    @property
    def every_s(self) -> float:
        return self._policy.every_s

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        answer = self._policy.place(view, now)
        self._into.extend((now, "place", a.sample_id, a.worker_id, a.reason) for a in answer)
        return answer

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        answer = self._policy.rebalance(view, now)
        self._into.extend((now, "move", a.sample_id, a.from_worker, a.to_worker, a.reason) for a in answer)
        return answer

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        answer = self._policy.window(view, now)
        told = None if answer is None else (answer.close, answer.reason, answer.again_at)
        if told != self._window:
            self._into.append((now, "window", told))
        self._window = told
        return answer

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        answer = self._policy.engines(view, now)
        if answer != self._engines:
            self._into.append((now, "engines", answer))
        self._engines = answer
        return answer

    def benefit(self) -> Benefit | None:
        return self._policy.benefit() if isinstance(self._policy, Weighs) else None

    def observe(self, fact: Fact, now: float) -> None:
        self._policy.observe(fact, now)


def digest(scenario: Scenario, simulated_policy: SimulatedPolicy) -> tuple[str, int]:
    """The hash, and how many answers are in it."""
    told: list[object] = []
    out = simulate(
        scenario, replace(simulated_policy, new_policy=lambda: Recorder(simulated_policy.new_policy(), told))
    )
    result = [
        (field.name, getattr(out, field.name))
        for field in fields(SimulationOutcome)
        if field.name != "events"
    ]
    text = "\n".join(repr(one) for one in (*told, *result))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), len(told)


def coming_and_going(seed: int, end_s: float) -> FleetTrace:
    """On eight nodes, every few seconds the idle GPUs of one become some other number."""
    stream = Streams(seed).stream("coming and going")
    nodes, deltas = "abcdefgh", []
    idle = dict.fromkeys(nodes, 4)
    for tick in range(1, int(end_s / 20)):
        node = nodes[int(stream.integers(8))]
        to = int(stream.integers(9))
        deltas.append((tick * 20.0, node, to - idle[node]))
        idle[node] = to
    return from_deltas("coming and going", end_s, dict.fromkeys(nodes, 8), dict.fromkeys(nodes, 4), deltas)


def small(seed: int, steps: int = 3) -> Scenario:
    """32 prompts on a fleet that comes and goes; answers that overflow bounds, batches and windows."""
    return Scenario(
        ENGINE,
        4,
        ENGINE,
        TRAINER,
        Lognormal.with_mean(1500, 0.9, 8192, 0.5),
        coming_and_going(seed, 3600.0),
        prompts=32,
        steps=steps,
        max_engines=16,
        max_batch=32,
        seed=seed,
    )


def large(fleet: FleetTrace, steps: int, seed: int = 0) -> Scenario:
    """The published setting's size: 1,024 answers a step."""
    return Scenario(
        ENGINE,
        8,
        ENGINE,
        TRAINER,
        Lognormal.with_mean(4000, 0.9, 14_336, 0.5),
        fleet,
        steps=steps,
        max_engines=64,
        heartbeat_s=5.0,
        tick_s=5.0,
        poll_interval_s=5.0,
        max_batch=64,
        seed=seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="earth_node_idle_72h.csv.gz")
    asked = parser.parse_args()
    names = ("ours", "rlboost", "polyrl", "ours + rlboost's window")
    cases = {f"small {seed}, {name}": (small(seed), name) for seed in (1, 2) for name in names}
    cases |= {f"large, {name}": (large(coming_and_going(3, 7200.0), 6), name) for name in ("ours", "rlboost")}
    if asked.trace:
        for hour in (0, 30):
            fleet = traces.read_nodes(asked.trace, 8, 72 * 3600.0).segment(hour * 3600.0, (hour + 2) * 3600.0)
            for name in ("ours", "rlboost"):
                cases[f"trace at {hour} h, {name}"] = (
                    replace(large(fleet, 1), steps=0, horizon_s=3000.0, max_engines=256),
                    name,
                )
    for case, (scenario, name) in cases.items():
        found, answers = digest(scenario, SIMULATED_POLICIES[name])
        print(f"{found} {answers:7d} answers  {case}", flush=True)


if __name__ == "__main__":
    main()
