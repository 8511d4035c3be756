"""Every policy of the benchmarks by its name: the product's, the published systems', mixtures of both, and ours without one controller.

For one scenario the baselines are told what an operator profiles of its engines before a run. RLBoost's B is "profiled": here from the
engine's decode curve and KV cache, with completions like the run's. Its paper gives no figure for Theta: twice B, since less costs it
throughput and more brings none (`benchmarks/sweep.py`). Reserved engines are taken to be like harvested ones. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from benchmarks.baselines.clairvoyant.site import clairvoyant
from benchmarks.baselines.mixed import mixed
from benchmarks.baselines.polyrl import POLYRL
from benchmarks.baselines.rlboost import RLBOOST, RLBoost, Settings, rlboost
from scavenger.policy.predictive.settings import PredictiveSettings as Controllers
from scavenger.simulate import policies
from scavenger.simulate.clock import Streams
from scavenger.simulate.policies import OURS, SimulatedPolicy, ours, predictive
from scavenger.simulate.scenario import Scenario

_UNPROFILED = Settings()


def of_rlboost(settings: Settings = _UNPROFILED) -> Mapping[str, SimulatedPolicy]:
    """RLBoost, and what separates the effects: the baseline with our fleet size, and ours with the baseline's window."""
    theirs = functools.partial(RLBoost, settings)
    found = (
        rlboost(settings),
        mixed("rlboost + our harvest", placing=theirs, seeding=theirs, growing=predictive),
        mixed("ours + rlboost's window", placing=predictive, seeding=theirs, growing=predictive),
    )
    return {one.name: one for one in found}


#: Without RLBoost itself; for their names. Played, they are made for a scenario.
MIXTURES = {name: one for name, one in of_rlboost().items() if name != RLBOOST.name}
#: One controller or effect switched off each; start benefits: what is idle is taken at once, whatever it is worth.
_WITHOUT = {
    "its window": Controllers(window=False),
    "its placement": Controllers(placement=False),
    "limits": Controllers(limits=False),
    "rebalancing": Controllers(rebalance=False),
    "merged tails": Controllers(tails=False),
    "its autoscaler": Controllers(fleet=False),
}
ABLATIONS: dict[str, SimulatedPolicy] = {
    f"ours without {what}": ours(left, f"ours without {what}") for what, left in _WITHOUT.items()
}
ABLATIONS["ours without start benefits"] = ours(
    Controllers(), "ours without start benefits", start_benefits=False
)
SIMULATED_POLICIES: Mapping[str, SimulatedPolicy] = {
    one.name: one
    for one in (
        policies.COLOCATED,
        policies.DISAGGREGATED,
        RLBOOST,
        POLYRL,
        OURS,
        *MIXTURES.values(),
        *ABLATIONS.values(),
    )
}


#: Of the throughput of as many as fit: beyond B there is no more than the rest to be had.
PLATEAU = 0.9
THETA_OVER_B = 2
ORACLE_SCHEDULE = "clairvoyant"
#: Every policy's name. The clairvoyant one is told what this very scenario holds.
KNOWN = (*SIMULATED_POLICIES, ORACLE_SCHEDULE)


def simulated_policy(name: str, scenario: Scenario) -> SimulatedPolicy:
    """Raises `KeyError` for a name that is none."""
    if name == ORACLE_SCHEDULE:
        return clairvoyant(scenario)
    return {**SIMULATED_POLICIES, **of_rlboost(profiled(scenario))}[name]


def profiled(scenario: Scenario) -> Settings:
    """RLBoost's settings for the scenario's engines."""
    spec = scenario.harvested
    batch = spec.plateau(running_context(scenario), PLATEAU)
    rate = spec.prefill_chunk / spec.prefill_s(spec.prefill_chunk)
    return Settings(theta=THETA_OVER_B * batch, batch=batch, prefill_tokens_s=rate)


def running_context(scenario: Scenario) -> float:
    """Tokens of context of a sample that runs, on average over time: p + E[L^2] / (2 E[L]), as it grows evenly from p to p + L.

    Of completions that no step of the run has: steps are numbered from 1.
    """
    streams = Streams(scenario.seed)
    groups = [
        scenario.lengths.group(streams, 0, prompt, scenario.samples) for prompt in range(scenario.prompts)
    ]
    lengths = [length for group in groups for length in group]
    return scenario.prompt_tokens + sum(length * length for length in lengths) / (2 * sum(lengths))
