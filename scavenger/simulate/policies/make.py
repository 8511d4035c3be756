"""A contender by its name, made for one scenario: what an operator profiles of its engines before a run, the baselines are told. Pure.

RLBoost's B is "profiled": here from the engine's decode curve and KV cache, with answers like the run's. Its paper gives no figure for
Theta: twice B, since less costs it throughput and more brings none (`benchmarks/sweep.py`). Reserved engines are taken to be like
harvested ones.
"""

from __future__ import annotations

from scavenger.simulate.clock import Streams
from scavenger.simulate.policies.clairvoyant.site import clairvoyant
from scavenger.simulate.policies.registry import SIMULATED_POLICIES, of_rlboost
from scavenger.simulate.policies.rlboost import Settings
from scavenger.simulate.policy import SimulatedPolicy
from scavenger.simulate.scenario import Scenario

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

    Of answers that no step of the run has: steps are numbered from 1.
    """
    streams = Streams(scenario.seed)
    groups = [
        scenario.lengths.group(streams, 0, prompt, scenario.samples) for prompt in range(scenario.prompts)
    ]
    lengths = [length for group in groups for length in group]
    return scenario.prompt_tokens + sum(length * length for length in lengths) / (2 * sum(lengths))
