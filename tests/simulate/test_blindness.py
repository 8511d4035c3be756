"""No policy can read the truth: completion lengths, generators' parameters, engines' parameters, the fleet's future.

Two walls: a policy's module imports nothing of the simulator that knows them; and no such object can be reached from what one is handed
(its views, its facts) or from what it keeps. The clairvoyant one is meant to know, and stands elsewhere (`clairvoyant_site.py`).
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines.mixed import mixed
from benchmarks.baselines.polyrl import PolyRL
from benchmarks.baselines.rlboost import RLBOOST, RLBoost
from scavenger.policy.interface import (
    Fact,
    RouterPolicy,
    RunView,
    SampleMove,
    SamplePlacement,
    WindowDecision,
)
from scavenger.simulate.driver import simulate
from scavenger.simulate.policies import COLOCATED, DISAGGREGATED, OURS, SimulatedPolicy
from tests.simulate.test_driver import UNEVEN, coming_and_going
from tests.test_architecture import ROOT, reached_from, sources

#: All of the simulator that a policy may reach by imports: other policies, and the word for what it is.
ALLOWED = ("scavenger/simulate/policies/", "scavenger/simulate/policy.py", "scavenger/simulate/__init__.py")


def hidden(cls: type) -> bool:
    return cls.__module__.startswith("scavenger.simulate") and not cls.__module__.startswith(
        "scavenger.simulate.policies"
    )


def parts(thing: Any) -> Iterable[Any]:
    """What an object leads to. A function leads to what it closes over, not to its module; a class and a module to nothing."""
    if isinstance(thing, type | types.ModuleType):
        return ()
    if isinstance(thing, types.FunctionType):
        return (cell.cell_contents for cell in thing.__closure__ or ())
    if hasattr(type(thing), "__struct_fields__"):  # msgspec structs are not the collector's
        return (getattr(thing, name) for name in type(thing).__struct_fields__)
    if is_dataclass(thing):
        return (getattr(thing, field.name, None) for field in fields(thing))
    return gc.get_referents(thing)


def leaks(*roots: Any) -> list[str]:
    """Hidden objects that can be reached from `roots`, with the way there."""
    found, seen = [], {id(root) for root in roots}
    todo: list[tuple[Any, str]] = [(root, type(root).__name__) for root in roots]
    keep = list(roots)  # ids stay taken while we look
    while todo:
        thing, way = todo.pop()
        if hidden(type(thing)):
            found.append(way)
            continue
        for part in parts(thing):
            if id(part) not in seen:
                seen.add(id(part))
                keep.append(part)
                todo.append((part, f"{way} > {type(part).__name__}"))
    return found


class Watched:
    """A policy under whose hands everything is looked at."""

    def __init__(self, policy: RouterPolicy) -> None:
        self._policy = policy
        self.leaks: list[str] = []
        self.looks = 0

    @property
    def every_s(self) -> float:
        return self._policy.every_s

    def _look(self, *handed: Any) -> None:
        self.looks += 1
        if self.looks % 20 == 1:
            self.leaks += leaks(*handed, self._policy)

    def place(self, view: RunView, now: float) -> Sequence[SamplePlacement]:
        self._look(view, view.samples, view.queued, view.workers, view.step)
        return self._policy.place(view, now)

    def rebalance(self, view: RunView, now: float) -> Sequence[SampleMove]:
        self._look(view)
        return self._policy.rebalance(view, now)

    def window(self, view: RunView, now: float) -> WindowDecision | None:
        self._look(view)
        return self._policy.window(view, now)

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        self._look(view)
        return self._policy.engines(view, now)

    def observe(self, fact: Fact, now: float) -> None:
        self._look(fact)
        self._policy.observe(fact, now)


def watched(simulated_policy: SimulatedPolicy) -> tuple[SimulatedPolicy, list[Watched]]:
    made: list[Watched] = []

    def make() -> RouterPolicy:
        made.append(Watched(simulated_policy.new_policy()))
        return made[-1]

    return replace(simulated_policy, new_policy=make), made


SMALL = replace(UNEVEN, prompts=8, steps=2, fleet=coming_and_going(4), max_engines=6)
SEEN: list[SimulatedPolicy] = [
    COLOCATED,
    DISAGGREGATED,
    RLBOOST,
    OURS,
    mixed("rlboost window, polyrl placement", PolyRL, RLBoost, RLBoost),
]


@pytest.mark.parametrize("simulated_policy", SEEN, ids=lambda c: c.name)
def test_nothing_that_reaches_a_policy_leads_to_the_truth(simulated_policy: SimulatedPolicy) -> None:
    blind, made = watched(simulated_policy)
    simulate(SMALL, blind)
    assert made[0].looks > 100
    assert made[0].leaks == []


def test_the_scan_finds_a_policy_that_was_given_the_lengths() -> None:
    class Peeking(RLBoost):
        def __init__(self, find: Callable[[], Any]) -> None:
            super().__init__()
            self.find = find

    blind, made = watched(replace(RLBOOST, new_policy=lambda: Peeking(lambda: SMALL.lengths)))
    simulate(SMALL, blind)
    assert made[0].leaks == [], "a name in a module is not a reference: the import rule stands against that"
    lengths = SMALL.lengths
    blind, made = watched(replace(RLBOOST, new_policy=lambda: Peeking(lambda: lengths)))
    simulate(SMALL, blind)
    assert any(way.endswith("Lognormal") for way in made[0].leaks)


def policy_modules() -> list[Path]:
    found = sources(
        "scavenger/simulate/policies/*.py",
        "scavenger/policy/**/*.py",
        "scavenger/router/**/*.py",
        "scavenger/harvest/**/*.py",
    )
    return [path for path in found if path.name != "make.py"]  # which makes the one that does know


def test_no_policy_imports_what_knows_the_truth() -> None:
    offenders = {
        chain
        for path in policy_modules()
        for module, chain in reached_from(path).items()
        if (name := module.relative_to(ROOT).as_posix()).startswith("scavenger/simulate/")
        and not name.startswith(ALLOWED)
    }
    assert not offenders, "\n".join(["", *sorted(offenders)])
