"""The policies by name. All but the clairvoyant one, which is made for one scenario (`clairvoyant_site`)."""

from __future__ import annotations

from collections.abc import Mapping

from scavenger.simulate.contender import Contender
from scavenger.simulate.policies.colocated import COLOCATED
from scavenger.simulate.policies.disaggregated import DISAGGREGATED
from scavenger.simulate.policies.mixed import mixed
from scavenger.simulate.policies.ours import ABLATIONS, OURS, predictive
from scavenger.simulate.policies.polyrl import POLYRL
from scavenger.simulate.policies.rlboost import RLBOOST, RLBoost

#: What separates the effects: the baseline with our fleet size, and ours with the baseline's window.
MIXTURES = {
    one.name: one
    for one in (
        mixed("rlboost + our harvest", placing=RLBoost, seeding=RLBoost, growing=predictive),
        mixed("ours + rlboost's window", placing=predictive, seeding=RLBoost, growing=predictive),
    )
}
CONTENDERS: Mapping[str, Contender] = {
    one.name: one for one in (COLOCATED, DISAGGREGATED, RLBOOST, POLYRL, OURS, *MIXTURES.values(), *ABLATIONS.values())
}
