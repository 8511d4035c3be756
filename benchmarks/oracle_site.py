"""The oracle's bound for the steps of a simulated site: its lengths, its trainer, and all the engines that its fleet has room for. Pure.

What a step may use is not what a policy had: at every moment as many harvested engines as fit on the idle GPUs, each there with its weights
from the first second, none ever starting. So the bound holds whatever is harvested. Owns that translation; `oracle.py` has the proof.
"""

from __future__ import annotations

import math

from benchmarks.oracle import OracleEngine, OracleGroup, OracleStep, StepBound, bound
from scavenger.simulate.clock import Streams
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.trainer_model import publish_s, state_bytes_per_gpu, to_generating_s, to_training_s


class SiteBound:
    """Of one scenario's steps, which are numbered from 1."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._streams = Streams(scenario.seed)
        self._engines_by_time = _engines_by_time(scenario)

    def of(self, step: int, start_s: float, end_s: float) -> StepBound:
        """No schedule ends this step sooner when it begins at `start_s`. `end_s`: when it ended; what the fleet is later does not count."""
        sc, trainer = self._scenario, self._scenario.trainer
        groups = tuple(
            OracleGroup(sc.prompt_tokens, sc.lengths.group(self._streams, step, prompt, sc.samples))
            for prompt in range(sc.prompts)
        )
        reserved = sc.reserved if sc.offload else sc.reserved.with_resident(state_bytes_per_gpu(trainer))
        toggles = to_training_s(trainer, sc.offload), to_generating_s(trainer, sc.offload, sc.reserved.gpus)
        engines = (
            *[OracleEngine(reserved, reserved=True)] * sc.reserved_engines,
            *self.harvested(start_s, end_s),
        )
        # asleep: reserved engines wake within the step, and need not if they never generate
        return bound(
            OracleStep(
                groups, engines, trainer, sc.round_tokens, *toggles, False, publish_s(trainer), sc.reward_s
            )
        )

    def harvested(self, start_s: float, end_s: float) -> list[OracleEngine]:
        """The k-th engine is there while at least k fit."""
        ends = [at for at, _ in self._engines_by_time[1:]] + [math.inf]
        during = [
            (at, end, fit)
            for (at, fit), end in zip(self._engines_by_time, ends, strict=True)
            if end > start_s and at <= end_s
        ]
        engines = []
        for number in range(1, max((fit for _, _, fit in during), default=0) + 1):
            there: list[tuple[float, float]] = []
            for at, end, fit in during:
                since, until = max(at - start_s, 0.0), math.inf if end > end_s else end - start_s
                if fit >= number and there and there[-1][1] == since:
                    there[-1] = there[-1][0], until
                elif fit >= number:
                    there.append((since, until))
            engines.append(OracleEngine(self._scenario.harvested, tuple(there)))
        return engines


def _engines_by_time(scenario: Scenario) -> list[tuple[float, int]]:
    """(since when, how many harvested engines fit), from 0 on."""
    gpus, most, fleet = scenario.harvested.gpus, scenario.max_engines, scenario.fleet
    by_node = {node: idle // gpus for node, idle in fleet.initial.items()}
    fit = sum(by_node.values())
    found = [(0.0, min(most, fit))]
    for change in fleet.changes:
        fit += change.idle // gpus - by_node[change.node]
        by_node[change.node] = change.idle // gpus
        if found[-1][0] == change.t_s:
            found.pop()
        if not found or found[-1][1] != min(most, fit):
            found.append((change.t_s, min(most, fit)))
    return found
