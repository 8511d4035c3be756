"""Ours: the controllers of the live daemon, as they are (`policy.predictive.policy`), and each of them without one, for the ablation."""

from __future__ import annotations

import functools

from scavenger.policy.interface import RouterPolicy
from scavenger.policy.predictive.policy import Predictive
from scavenger.policy.predictive.settings import Settings
from scavenger.simulate.policy import SimulatedPolicy

_ALL_ON = Settings()
#: A run's own rule where nobody decides its window: `reserved.window` in run.toml, as it is by default.
LIVE_WINDOW = 0.5


def predictive(settings: Settings = _ALL_ON) -> RouterPolicy:
    return Predictive("run", settings)


def ours(settings: Settings = _ALL_ON, name: str = "ours", *, gates: bool = True) -> SimulatedPolicy:
    return SimulatedPolicy(name, functools.partial(predictive, settings), window=LIVE_WINDOW, gates=gates)


OURS = ours()
#: One controller or effect switched off each; gates: what is idle is taken at once, whatever it is worth.
_WITHOUT = {
    "its window": Settings(window=False),
    "reopening": Settings(reopen=False),
    "its placement": Settings(placement=False),
    "limits": Settings(limits=False),
    "rebalancing": Settings(rebalance=False),
    "merged tails": Settings(tails=False),
    "its autoscaler": Settings(fleet=False),
}
ABLATIONS: dict[str, SimulatedPolicy] = {
    f"ours without {what}": ours(left, f"ours without {what}") for what, left in _WITHOUT.items()
}
ABLATIONS["ours without gates"] = ours(_ALL_ON, "ours without gates", gates=False)
