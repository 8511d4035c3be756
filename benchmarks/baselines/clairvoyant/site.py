"""What the clairvoyant policy knows of a simulated site: the scenario itself, its lengths and its fleet's future. Pure.

Owns the one door from a scenario's truth to a policy. Nothing else may open it: `clairvoyant.py` is told, every other policy must learn.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from benchmarks.baselines.clairvoyant.policy import ExpectedEngine, OracleSchedule
from scavenger.policy.interface import SampleView, WorkerView
from scavenger.simulate.clock import Streams
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.policies import SimulatedPolicy
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.trainer_model import (
    TrainerSpec,
    publish_s,
    state_bytes_per_gpu,
    to_generating_s,
    to_training_s,
)


class SiteTruth:
    """`Knows` of one simulation with one run, whose groups are numbered from 1 in the order of steps and prompts."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._streams = Streams(scenario.seed)
        self._groups: dict[int, tuple[int, ...]] = {}
        self._losses: dict[tuple[str, float, int], float] = {}
        self.trainer: TrainerSpec = scenario.trainer
        self.token_budget = scenario.round_tokens
        self.publish_s = publish_s(scenario.trainer)
        offload = scenario.offload
        self.toggles_s = (
            to_training_s(scenario.trainer, offload),
            to_generating_s(scenario.trainer, offload, scenario.reserved.gpus),
        )
        self._reserved = (
            scenario.reserved
            if offload
            else scenario.reserved.with_resident(state_bytes_per_gpu(scenario.trainer))
        )
        self._idle: dict[str, tuple[list[float], list[int]]] = {
            node: ([0.0], [idle]) for node, idle in scenario.fleet.initial.items()
        }
        for change in scenario.fleet.changes:
            times, idle = self._idle[change.node]
            times.append(change.t_s)
            idle.append(change.idle)

    def length(self, sample: SampleView) -> int:
        group = self._groups.get(sample.group_id)
        if group is None:
            scenario = self._scenario
            step, prompt = divmod(sample.group_id - 1, scenario.prompts)
            group = scenario.lengths.group(self._streams, step + 1, prompt, scenario.samples)
            self._groups[sample.group_id] = group
        return group[sample.index]

    def spec(self, worker: WorkerView) -> SimulatedEngine:
        return self._reserved if worker.kind == "reserved" else self._scenario.harvested

    def lost_at(self, worker: WorkerView) -> float:
        """When others want more than half of what idled on its node when it came: which of several engines goes is not decided yet."""
        if worker.kind == "reserved" or worker.node not in self._idle:
            return math.inf
        came = worker.node, worker.joined_at, worker.gpus
        if came not in self._losses:
            times, idle = self._idle[worker.node]
            since = bisect_right(times, worker.joined_at)
            enough = max(worker.gpus, idle[since - 1] // 2)
            self._losses[came] = next(
                (t for t, left in zip(times[since:], idle[since:], strict=True) if left < enough), math.inf
            )
        return self._losses[came]

    def coming(self, now: float) -> Sequence[ExpectedEngine]:
        """None: which engines come is what the fleet and the policy's own wishes make of it. They count once they serve."""
        return ()


def clairvoyant(scenario: Scenario) -> SimulatedPolicy:
    """The contender for this very scenario."""
    return SimulatedPolicy("clairvoyant", lambda: OracleSchedule(SiteTruth(scenario)))
