"""Several runs over one fleet in virtual time: who gets what under each division, and that one run alone is as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fleet import jain, parts, with_idle
from scavenger.errors import ConfigError
from scavenger.harvest.decide.actions import HandsRules, OwnerRule
from scavenger.policy.division import DivisionRules
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.interface import RunView, Standard
from scavenger.simulate.driver import SimulatedRun, simulate, simulate_fleet
from scavenger.simulate.fleet import from_deltas
from scavenger.simulate.outcome import SimulationOutcome
from scavenger.simulate.policies import SimulatedPolicy
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.site_cluster import SimulatedDivision
from scavenger.simulate.site_trainer import RUN
from tests.simulate.test_driver import ALWAYS, UNEVEN


class Worth(Standard):
    """Wants `wants` engines, whose saving falls by a curve with `work` seconds of each hundred to be shared."""

    def __init__(self, wants: int, work: float) -> None:
        self._wants = wants
        sizes = range(wants + 1)
        curve = tuple((n, 100.0 - work + work / (1 + n)) for n in sizes)
        self._benefit = Benefit(0.05, 8.0, 1, 30.0, curve=curve)

    def engines(self, view: RunView, now: float) -> tuple[int, str]:
        return self._wants, "always"

    def benefit(self) -> Benefit:
        return self._benefit


def worth(wants: int, work: float) -> SimulatedPolicy:
    return SimulatedPolicy("worth", lambda: Worth(wants, work), window=0.4)


PLAYED = replace(UNEVEN, steps=0, horizon_s=1800.0, max_engines=16)
VALUE = SimulatedDivision(DivisionRules(floor=0.9, wait_s=300.0, hold_s=60.0))


def gpus(out: SimulationOutcome) -> float:
    return sum(engine.gpus * engine.allocated_s for engine in out.engines) / out.seconds


def played(division: SimulatedDivision, *works: float, comes_s: float = 0.0) -> list[SimulationOutcome]:
    runs = [
        SimulatedRun(f"r{n}", replace(PLAYED, seed=n), worth(16, work), f"owner{n}", comes_s * n)
        for n, work in enumerate(works)
    ]
    return simulate_fleet(runs, division)


def test_one_run_of_several_is_the_run_alone() -> None:
    alone = simulate(UNEVEN, worth(8, 50.0))
    (shared,) = simulate_fleet([SimulatedRun(RUN, UNEVEN, worth(8, 50.0))], SimulatedDivision())
    assert replace(shared, engines=(), events=0) == replace(alone, engines=(), events=0)
    assert shared.engines == alone.engines


def test_who_came_first_is_served_in_full() -> None:
    first, second = played(SimulatedDivision(first_come=True), 50.0, 50.0)
    assert gpus(first) > 15
    assert not second.engines


def test_turns_keep_what_they_have_and_value_gives_to_a_run_that_comes_later() -> None:
    for division, late in ((SimulatedDivision(), 0.0), (VALUE, 4.0)):
        first, second = played(division, 50.0, 50.0, comes_s=300.0)
        assert gpus(first) > 8
        assert gpus(second) >= late
        assert bool(second.engines) is (late > 0)
        assert second.since_s == 300.0


def test_value_gives_most_to_the_run_that_gains_most_and_its_floor_to_the_other() -> None:
    poor, rich = played(VALUE, 30.0, 95.0)
    assert gpus(rich) > 1.3 * gpus(poor)
    assert gpus(poor) > 1.5


def test_alike_runs_get_gpus_by_the_shares_of_their_owners() -> None:
    owners = (OwnerRule("owner0", 7), OwnerRule("owner1", 3))
    large, small = played(replace(VALUE, owners=owners), 80.0, 80.0)
    assert gpus(large) / gpus(small) == pytest.approx(7 / 3, rel=0.15)


def test_engines_that_change_hands_serve_the_other_run_sooner_than_new_ones() -> None:
    """The second run comes late to a full fleet: its floor comes from the first one's engines, in the same jobs."""
    (_, started), (first, handed) = (
        played(replace(VALUE, hands=hands), 50.0, 50.0, comes_s=300.0) for hands in (None, HandsRules())
    )
    over = [engine for engine in first.engines if engine.why == "handed over"]
    assert over
    begun = {(engine.node, engine.start_s) for engine in handed.engines}
    assert {(engine.node, engine.end_s) for engine in over} <= begun, "on the same GPUs, at once"
    waits = [min(e.ready_s - e.start_s for e in out.engines if e.ready_s >= 0) for out in (handed, started)]
    assert waits[0] < waits[1]


#: Two LoRA runs of one base, more of whose samples wait at a step's beginning than their engines have slots.
LORA = replace(PLAYED, adapter_share=0.005, share_engines=True, max_batch=16, horizon_s=900.0)


def lending(first: Scenario, second: Scenario, slots: int = 8) -> list[SimulationOutcome]:
    runs = [
        SimulatedRun(f"r{n}", replace(scenario, seed=n), worth(6, 60.0), f"owner{n}")
        for n, scenario in enumerate((first, second))
    ]
    return simulate_fleet(runs, replace(VALUE, lend_slots=slots))


def test_an_engine_in_its_runs_tail_lends_slots_to_samples_that_wait() -> None:
    """By the code that decides it live; every token is recorded or lost once, or the simulation says so."""
    outs = lending(LORA, LORA)
    assert sum(out.loans for out in outs) >= 4
    assert all(0 < out.borrowed_tokens < out.tokens for out in outs)
    assert outs[0].generated == outs[0].recorded + sum(out.regenerated for out in outs)
    none = lending(LORA, LORA, slots=0)
    assert not any(out.loans or out.borrowed_tokens for out in none)
    assert sum(out.tokens_per_s for out in outs) > sum(out.tokens_per_s for out in none)


def test_nobody_lends_to_a_run_that_does_not_share_or_has_another_engine() -> None:
    for other in (replace(LORA, share_engines=False), replace(LORA, context_tokens=32_768)):
        assert not any(out.loans for out in lending(LORA, other))


def test_a_borrower_goes_with_the_engine_that_is_taken() -> None:
    """Other users take every node in mid-loan, again and again: no token is lost that was handed over, and nothing counts twice."""
    takes = [
        (at, node, change)
        for at in range(100, 900, 90)
        for node in "ab"
        for at, change in ((at, -8), (at + 20, 8))
    ]
    fleet = from_deltas("taken", 1e7, {"a": 8, "b": 8}, {"a": 8, "b": 8}, takes)
    outs = lending(replace(LORA, fleet=fleet), replace(LORA, fleet=fleet))
    assert sum(out.preemptions for out in outs) > 8
    assert sum(out.loans for out in outs) > 0
    assert outs[0].generated == outs[0].recorded + sum(out.regenerated for out in outs)


def test_runs_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="r, r"):
        simulate_fleet([SimulatedRun("r", PLAYED, worth(1, 1.0))] * 2, SimulatedDivision())


def test_a_static_division_deals_every_node_once_and_idle_time_evenly() -> None:
    fleet = from_deltas("t", 100.0, dict.fromkeys("abcd", 8), dict.fromkeys("abcd", 8), [(50.0, "a", -8)])
    dealt = parts(fleet, 2)
    assert sorted(name for part in dealt for name in part.capacity) == list("abcd")
    assert [len(part.capacity) for part in dealt] == [2, 2]
    assert sum(len(part.changes) for part in dealt) == 1
    assert parts(ALWAYS, 1)[0].capacity == ALWAYS.capacity


def test_jains_index_is_one_where_all_are_alike_and_one_in_n_where_one_has_all() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([5.0, 0.0]) == pytest.approx(0.5)


def test_what_reserved_gpus_did_adds_up() -> None:
    """They generate, change over, train or wait, and of the first as much as their engines had samples for."""
    out = simulate(UNEVEN, worth(8, 50.0))
    reserved = out.reserved
    assert reserved is not None
    steps = out.steps
    assert sum(reserved.waits) == pytest.approx(sum(step.wait_s for step in steps))
    assert sum(reserved.waits) > 0
    assert reserved.awake_s == pytest.approx(sum(step.seed_s for step in steps))
    idle = reserved.awake_s - reserved.busy_s / reserved.engines
    assert 0 <= idle < reserved.awake_s
    assert reserved.idle_gpu_s == pytest.approx(UNEVEN.gpus_reserved * (idle + sum(reserved.waits)))
    assert reserved.waited_longer(0.0) == pytest.approx(UNEVEN.gpus_reserved * sum(reserved.waits))
    assert reserved.waited_longer(max(reserved.waits) + 1) == 0


def test_a_node_that_stands_for_lent_gpus_is_idle_all_the_time() -> None:
    more = with_idle(ALWAYS, 2)
    assert more.gpus == ALWAYS.gpus + 2
    assert {change.node for change in more.changes} == {change.node for change in ALWAYS.changes}
