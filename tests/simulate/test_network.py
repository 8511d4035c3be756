"""Weight pulls in virtual time: hand-computed cases, and without relays the closed form of shared interfaces."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.simulate.clock import Simulation
from scavenger.simulate.network import Network, fair_rates


@dataclass
class Pulls:
    """A network, what is asked of it at which time, and when each pull was over."""

    source: float
    end: float
    relay: bool = False
    sim: Simulation = field(default_factory=Simulation)
    over: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.network = Network(self.sim, self.source, self.end, self.relay)

    def pull(self, name: str, start_s: float, nbytes: float) -> None:
        self.at(start_s, lambda: self.network.pull(name, nbytes, lambda: self._done(name)))

    def at(self, time_s: float, what: Callable[[], None]) -> None:
        self.sim.at(time_s, what)

    def _done(self, name: str) -> None:
        assert name not in self.over
        self.over[name] = self.sim.now

    def run(self) -> dict[str, float]:
        while self.sim.step():
            pass
        assert not self.network._flows, "nothing is left over"
        return self.over


def finish_times(pulls: Sequence[tuple[str, float, float]], source: float, end: float) -> dict[str, float]:
    """(name, start, bytes): when each is over, all sharing one interface, max-min fair, piecewise constant."""
    left = {name: nbytes for name, _, nbytes in pulls}
    start = {name: start_s for name, start_s, _ in pulls}
    done: dict[str, float] = {}
    now = min(start.values())
    while left:
        rates = fair_rates({name: end for name in left if start[name] <= now}, source)
        ends = {name: now + left[name] / rate for name, rate in rates.items()}
        until = min([*ends.values(), *(at for name, at in start.items() if name in left and at > now)])
        for name, rate in rates.items():
            left[name] -= rate * (until - now)
            if ends[name] <= until:
                done[name] = until
                del left[name]
        now = until
    return done


# ---------------------------------------------------------------- no relays: all share the source's interface


def test_one_pull_goes_at_the_narrower_interfaces_full_rate() -> None:
    for source, end in ((100.0, 50.0), (50.0, 100.0)):
        for relay in (False, True):
            pulls = Pulls(source, end, relay)
            pulls.pull("a", 3.0, 100.0)
            assert pulls.run() == {"a": pytest.approx(5.0)}


def test_pulls_share_the_trainers_interface_and_speed_up_when_others_end() -> None:
    pulls = Pulls(10.0, 20.0)
    pulls.pull("a", 0.0, 40.0)
    pulls.pull("b", 1.0, 15.0)
    # alone at 10 for 1 s, two at 5 each for 3 s (b: 15 done), then a is alone with 15 left at 10
    assert pulls.run() == {"b": pytest.approx(4.0), "a": pytest.approx(5.5)}


def test_a_pull_that_is_given_up_leaves_its_share_to_the_others() -> None:
    pulls = Pulls(10.0, 10.0)
    pulls.pull("a", 0.0, 30.0)
    pulls.pull("b", 0.0, 30.0)
    pulls.at(2.0, lambda: pulls.network.cancel("b"))
    pulls.at(2.0, lambda: pulls.network.cancel("nobody"))
    assert pulls.run() == {"a": pytest.approx(4.0)}


def test_a_pull_of_the_same_name_begins_anew() -> None:
    pulls = Pulls(10.0, 10.0)
    pulls.pull("a", 0.0, 1000.0)
    pulls.pull("a", 2.0, 10.0)
    assert pulls.run() == {"a": pytest.approx(3.0)}


def test_nothing_to_pull_takes_no_time() -> None:
    pulls = Pulls(10.0, 10.0)
    pulls.pull("a", 2.0, 0.0)
    assert pulls.run() == {"a": 2.0}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 500)), min_size=1, max_size=12),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_without_relays_pulls_end_as_the_closed_form_says(
    asked: list[tuple[int, int]], source: int, end: int
) -> None:
    named = [(f"e{index}", float(start), float(nbytes)) for index, (start, nbytes) in enumerate(asked)]
    pulls = Pulls(float(source), float(end))
    for one in named:
        pulls.pull(*one)
    assert pulls.run() == pytest.approx(finish_times(named, source, end), abs=1e-4)


# ---------------------------------------------------------------- relays: in order, each at its full rate


def test_who_has_finished_serves_the_others() -> None:
    """The source feeds two at 50. At 2 s two are served and feed two more with it: four at once, then all."""
    pulls = Pulls(100.0, 50.0, relay=True)
    for index in range(8):
        pulls.pull(f"e{index}", 0.0, 100.0)
    assert pulls.run() == pytest.approx(
        {**{f"e{i}": 2.0 for i in (0, 1)}, **{f"e{i}": 4.0 for i in (2, 3, 4, 5)}, "e6": 6.0, "e7": 6.0}
    )


def test_later_ones_read_from_earlier_holders() -> None:
    pulls = Pulls(50.0, 50.0, relay=True)
    pulls.pull("first", 0.0, 100.0)
    for index in range(3):
        pulls.pull(f"e{index}", 2.5, 100.0)
    # the source and the first serve one each; the third waits for them, and has three to choose from
    assert pulls.run() == pytest.approx({"first": 2.0, "e0": 4.5, "e1": 4.5, "e2": 6.5})


def test_a_holder_gives_on_faster_than_a_narrow_source() -> None:
    pulls = Pulls(10.0, 50.0, relay=True)
    for index in range(3):
        pulls.pull(f"e{index}", 0.0, 100.0)
    # e0 alone at the source's 10; then e1 from the source at 10 and e2 from e0 at 50, who then serves e1 beside nobody
    assert pulls.run()["e0"] == pytest.approx(10.0)
    assert pulls.over["e2"] == pytest.approx(12.0)
    assert pulls.over["e1"] == pytest.approx(20.0)


def test_whoever_read_from_a_holder_that_leaves_keeps_what_it_has_and_waits_for_another() -> None:
    pulls = Pulls(50.0, 50.0, relay=True)
    pulls.pull("first", 0.0, 100.0)
    pulls.pull("e0", 2.5, 100.0)
    pulls.pull("e1", 2.5, 100.0)
    pulls.at(3.5, pulls.network.left_holder)
    # e1 has half when the first is gone; from 4.5 on the source (or e0) serves it the other half
    assert pulls.run() == pytest.approx({"first": 2.0, "e0": 4.5, "e1": 5.5})


def test_a_holder_that_leaves_when_nobody_holds_anything_is_none() -> None:
    pulls = Pulls(50.0, 50.0, relay=True)
    pulls.at(0.0, pulls.network.left_holder)
    pulls.pull("a", 1.0, 100.0)
    pulls.pull("b", 1.0, 100.0)
    assert pulls.run() == pytest.approx({"a": 3.0, "b": 5.0})


def test_a_new_version_has_no_holders_and_an_old_one_that_arrives_late_is_none() -> None:
    pulls = Pulls(50.0, 50.0, relay=True)
    pulls.pull("old", 0.0, 100.0)
    pulls.pull("late", 1.0, 100.0)
    pulls.at(2.5, pulls.network.new_version)
    pulls.pull("a", 2.5, 100.0)
    pulls.pull("b", 2.5, 100.0)
    # `late` reads on from the source until 4; a and b follow one after the other: `late` has nothing for them
    assert pulls.run() == pytest.approx({"old": 2.0, "late": 4.0, "a": 6.0, "b": 8.0})


def test_who_waits_moves_up_when_one_before_it_gives_up() -> None:
    pulls = Pulls(50.0, 50.0, relay=True)
    pulls.pull("a", 0.0, 100.0)
    pulls.pull("b", 0.0, 100.0)
    pulls.at(1.0, lambda: pulls.network.cancel("a"))
    assert pulls.run() == {"b": pytest.approx(3.0)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 500)), min_size=1, max_size=12),
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["cancel", "left", "version"]), st.integers(0, 11)),
        max_size=8,
    ),
    st.booleans(),
)
def test_whatever_comes_and_goes_nobody_is_faster_than_its_interface_and_all_end(
    asked: list[tuple[int, int]], events: list[tuple[int, str, int]], relay: bool
) -> None:
    pulls = Pulls(70.0, 30.0, relay)
    for index, (start, nbytes) in enumerate(asked):
        pulls.pull(f"e{index}", float(start), float(nbytes))
    network = pulls.network
    for time_s, what, which in events:
        cancel = functools.partial(network.cancel, f"e{which}")
        happens: dict[str, Callable[[], None]] = {
            "cancel": cancel,
            "left": network.left_holder,
            "version": network.new_version,
        }
        pulls.at(float(time_s), happens[what])
    over = pulls.run()
    cancelled = {f"e{which}" for _, what, which in events if what == "cancel"}
    assert over.keys() | cancelled >= {f"e{index}" for index in range(len(asked))}
    for name, end_s in over.items():
        start, nbytes = asked[int(name[1:])]
        assert end_s >= start + nbytes / 30.0 - 1e-4
    assert pulls.network._holders >= 0
    assert math.isfinite(pulls.sim.now)
