"""A policy that is tried in simulation, and what it may do.

Knows nothing of any scenario: policies import this, and no more of the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scavenger.policy.interface import RouterPolicy


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    """A policy with what it may do. `new_policy` makes one for each simulation: it learns from nothing but what it is told.

    `harvest`: it uses harvested engines at all; `reserved`: reserved GPUs generate too. `window`: the trainer's own rule where the policy
    decides nothing, a share of samples. `whole_groups`: engines serve a group as one request, whose answers are only handed over when all
    are done, and which moves as one, cut to its shortest answer (PolyRL). `sleeps`: while the window is open the trainer takes nothing in.

    `gates`: its engines are asked for through our harvester as it runs live, which starts none on a GPU that is not worth it, and chooses
    nodes (`site_cluster`). Ours, its ablations, and what is named "our harvest". The published systems take instances as they come. So does
    the clairvoyant one: it asks for all that it may have, for what an engine costs is not its objective, and no gate makes a step shorter.
    """

    name: str
    new_policy: Callable[[], RouterPolicy]
    harvest: bool = True
    reserved: bool = True
    window: float = 0.0
    whole_groups: bool = False
    sleeps: bool = False
    gates: bool = False
