"""The policies that a daemon can be told to run, by the names of `router.policy` in `scavenger.toml`. Pure.

Owns the names. Every run gets a policy of its own: what it learns of one run's lengths says nothing of another's.
"""

from __future__ import annotations

from scavenger.errors import ConfigError
from scavenger.policy.interface import NewPolicy, Standard
from scavenger.policy.predictive.policy import Predictive
from scavenger.policy.predictive.settings import PredictiveSettings

NAMES = ("predictive", "standard")


def named(name: str, harvested_gpu_price: float = 1.0) -> NewPolicy:
    """What makes the policy of a run. Raises `ConfigError` for a name that no policy has."""
    if name == "predictive":
        return lambda run: Predictive(run, PredictiveSettings(price=harvested_gpu_price))
    if name == "standard":
        return lambda _run: Standard()
    raise ConfigError(f"there is no policy {name!r}", f"set router.policy to one of: {', '.join(NAMES)}")
