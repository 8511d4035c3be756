"""Hypothesis plays against the router and its workers: its rules are the ops of `world`, its invariants the checks that every op runs.

It shrinks what it finds by itself, and tries what the odds of `draw` would not.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.router.engines import LIES
from tests.router.plants import PLANTS
from tests.router.site import Op
from tests.router.world import World

NAMES = st.integers(10, 14)
FEW = st.integers(1, 3)
#: Trainers are named from here on: a name is one peer's, and an example may start as many trainers as it has steps.
TRAINERS = 100


class RouterMachine(RuleBasedStateMachine):
    """Up to five workers, one run, now and then a second trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.trainers = TRAINERS
        self.spawned = 0

    def do(self, *op: Any) -> None:
        made: Op = list(op)
        self.world.apply(made)

    @initialize(moments=st.integers(1, 6), workers=st.integers(1, 3))
    def begin(self, moments: int, workers: int) -> None:
        self.do("train", self.trainers, "r", 0, False)
        for name in range(10, 10 + workers):
            self.do("spawn", name, "harvested", "r", f"i{name}", f"n{name % 3}")
        self.do("serve", moments)

    @rule(seconds=st.sampled_from((0.1, 0.5, 2.0, 5.0)))
    def tick(self, seconds: float) -> None:
        self.do("tick", seconds)

    @rule(most=FEW)
    def commit(self, most: int) -> None:
        self.do("commit", most)

    @rule()
    def answer(self) -> None:
        self.do("answer")

    @precondition(lambda self: self.world.daemon.reads)
    @rule()
    def read(self) -> None:
        self.do("read")

    @rule(name=NAMES, tokens=FEW)
    def turn(self, name: int, tokens: int) -> None:
        self.do("turn", name, tokens)

    @rule(name=NAMES, kind=st.sampled_from(("do", "trip", "kill", "term", "die", "stop", "cont")))
    def worker(self, name: int, kind: str) -> None:
        self.do(kind, name)

    @rule(name=NAMES, way=st.sampled_from(("up", "down")), most=FEW)
    def deliver(self, name: int, way: str, most: int) -> None:
        self.do(way, name, most)

    @rule(name=NAMES, way=st.sampled_from(("up", "down")), most=FEW)
    def lose(self, name: int, way: str, most: int) -> None:
        self.do("lose", name, way, most)

    @rule(name=NAMES, way=st.sampled_from(("up", "down")))
    def double(self, name: int, way: str) -> None:
        self.do("twice", name, way)

    @rule(name=NAMES, lost=st.booleans())
    def cut(self, name: int, lost: bool) -> None:
        self.do("cut", name, lost)

    @rule(name=NAMES, kind=st.integers(0, len(LIES) - 1))
    def lie(self, name: int, kind: int) -> None:
        self.do("lie", name, kind)

    @rule(name=NAMES)
    def spawn(self, name: int) -> None:
        self.do("spawn", name, "harvested", "r", f"i{name}", f"n{name % 3}")

    @rule(name=NAMES, crashed=st.booleans())
    def gone(self, name: int, crashed: bool) -> None:
        incarnation = self.world.incarnations.get(f"i{name}", (0, "", ""))[0]
        self.do("gone", f"i{name}", incarnation, "FAILED" if crashed else "PREEMPTED", crashed)

    @precondition(lambda self: any(link.old and link.up for link in self.world.links.values()))
    @rule(which=st.integers(0, 3))
    def late(self, which: int) -> None:
        old = [conn for conn, link in self.world.links.items() if link.old and link.up]
        self.do("late", old[which % len(old)])

    @rule(keep=st.booleans())
    def crash(self, keep: bool) -> None:
        self.do("crash", keep)

    @rule(kind=st.sampled_from(("succeed", "fence")))
    def another_daemon(self, kind: str) -> None:
        self.do(kind)

    @rule()
    def trainer(self) -> None:
        for name in list(self.world.trainers):
            self.do("move", name)

    @rule(back=st.integers(0, 2), other=st.booleans(), kill=st.booleans())
    def another_trainer(self, back: int, other: bool, kill: bool) -> None:
        if kill:
            self.do("tkill", self.trainers)
        self.trainers += 1
        self.do("train", self.trainers, "r", back, other)

    @rule(moments=FEW)
    def serve(self, moments: int) -> None:
        self.do("serve", moments)

    @invariant()
    def tables_agree(self) -> None:
        self.world.daemon.router.check()

    def teardown(self) -> None:
        if self.world.campaigns:
            self.world.make_calm(alone=False)


def play(examples: int, steps: int, *, shrink: bool = True) -> None:
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    run_state_machine_as_test(
        RouterMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            phases=phases,
        ),
    )


def test_hypothesis_finds_no_way_to_break_the_router() -> None:
    play(examples=40, steps=30)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_hypothesis_finds_no_way_to_break_the_router_in_many_examples() -> None:
    play(examples=3_000, steps=80)


@pytest.mark.parametrize("name", ["tokens_forgotten_by_a_move", "acked_before_durable"])
def test_hypothesis_finds_a_planted_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name].plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"\(I\d"):
        play(examples=60, steps=40, shrink=False)
