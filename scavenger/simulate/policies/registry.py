"""The policies by name. All but the clairvoyant one; for a scenario `simulate.policies.make` makes them, with what is profiled for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from scavenger.simulate.policies.colocated import COLOCATED
from scavenger.simulate.policies.disaggregated import DISAGGREGATED
from scavenger.simulate.policies.mixed import mixed
from scavenger.simulate.policies.ours import ABLATIONS, OURS, predictive
from scavenger.simulate.policies.polyrl import POLYRL
from scavenger.simulate.policies.rlboost import RLBOOST, RLBoost, Settings, rlboost
from scavenger.simulate.policy import SimulatedPolicy

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
SIMULATED_POLICIES: Mapping[str, SimulatedPolicy] = {
    one.name: one
    for one in (COLOCATED, DISAGGREGATED, RLBOOST, POLYRL, OURS, *MIXTURES.values(), *ABLATIONS.values())
}
