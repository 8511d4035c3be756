"""What of decisions reaches the ledger: changes, in bounded rows, with codes; what was left out is counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from scavenger.ledger import records as rec
from scavenger.policy.fallback import with_fallback
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.interface import Inputs, NewPolicy, RouterPolicy, SampleMove, SamplePlacement, Standard
from scavenger.policy.predictive.policy import Predictive
from scavenger.policy.predictive.settings import PredictiveSettings
from scavenger.policy.registry import named
from scavenger.router.core import decision_log
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import NoPayloads
from scavenger.router.core.row_budget import BURST, EVERY_S
from scavenger.router.core.state import ActiveRun, RouterLimits
from scavenger.router.core.tables import Core
from scavenger.simulate.driver import simulate
from scavenger.simulate.policies import OURS
from tests.router.harness import SPEC, Bench, open_body, specs
from tests.simulate.digest import small


def core_and_run() -> tuple[Core, ActiveRun]:
    core = Core(RouterLimits(), 1, NoPayloads())
    core.now = 1000.0
    return core, ActiveRun(1, "r", "key", 0, SPEC)


def told(core: Core) -> list[rec.Decision]:
    return [
        r
        for action in core.finish_event()
        for r in getattr(action, "records", ())
        if isinstance(r, rec.Decision)
    ]


def test_a_row_for_each_answer_names_how_many_and_the_first_one_s_reason() -> None:
    core, run = core_and_run()
    decision_log.placed(
        core,
        run,
        [
            SamplePlacement(4, 1, "longest, 7 tokens"),
            SamplePlacement(5, 2, "next"),
            SamplePlacement(6, 1, "next, 3"),
        ],
    )
    decision_log.moved(core, run, [SampleMove(7, 1, 2, "two is idle")])
    place, move = told(core)
    assert (place.policy, place.action, place.code, place.subject) == (
        "placement",
        "lease",
        "placed",
        "sample 4",
    )
    assert place.reason == "longest, 7 tokens (and 2 more samples)"
    reasons = {"next": 2, "longest": 1}
    assert json.loads(place.inputs) == {
        "samples": 3,
        "by_worker": {"1": 2, "2": 1},
        "reasons": reasons,
        "run": "r",
    }
    assert (move.code, move.reason, json.loads(move.inputs)["moves"]) == ("moved", "two is idle", [[7, 1, 2]])


def test_placements_without_a_reason_are_not_told() -> None:
    core, run = core_and_run()
    decision_log.placed(core, run, [SamplePlacement(4, 1)])
    decision_log.moved(core, run, [])
    assert told(core) == []


def test_rows_of_one_kind_are_bounded_and_the_next_one_says_what_was_left_out() -> None:
    core, run = core_and_run()
    for _ in range(1000):
        core.now += 0.01
        decision_log.placed(core, run, [SamplePlacement(4, 1, "longest")])
    rows = told(core)
    assert BURST <= len(rows) <= BURST + 10 / EVERY_S + 1
    core.now += EVERY_S
    decision_log.placed(core, run, [SamplePlacement(4, 1, "longest")])
    (last,) = told(core)
    said = sum(json.loads(row.inputs).get("left_out", 0) for row in [*rows, last])
    assert said + len(rows) == 1000, "each answer is a row or is counted in one"


def test_a_window_of_short_steps_is_told_each_time_and_a_number_that_was_left_out_as_soon_as_there_is_room() -> (
    None
):
    core, run = core_and_run()
    for turn in range(100):
        core.now += 1.5
        run.decisions.window = "open" if turn % 2 else "close"
        decision_log.window(core, run, False, {})
    assert len(told(core)) == 100
    for number in range(2 * BURST):
        decision_log.engines(core, run, number, "why", None)
    assert [json.loads(row.inputs)["engines"] for row in told(core)] == list(range(BURST))
    core.now += EVERY_S
    decision_log.engines(core, run, 2 * BURST - 1, "why", None)
    [row] = told(core)
    assert (json.loads(row.inputs)["before"], json.loads(row.inputs)["engines"]) == (BURST - 1, 2 * BURST - 1)


def test_one_kind_does_not_use_up_another_s_rows_nor_another_run_s() -> None:
    core, run = core_and_run()
    for _ in range(2 * BURST):
        decision_log.placed(core, run, [SamplePlacement(4, 1, "longest")])
    told(core)
    decision_log.moved(core, run, [SampleMove(7, 1, 2, "idle")])
    decision_log.placed(core, ActiveRun(2, "other", "key", 0, SPEC), [SamplePlacement(4, 1, "longest")])
    assert [row.policy for row in told(core)] == ["rebalance", "placement"]


def test_the_window_s_codes_say_what_kind_of_change_it_is() -> None:
    core, run = core_and_run()
    run.progress.newest = ("train", 3)
    codes = []
    for said, all_done in (("open", False), ("close", False), ("close", True), ("", False)):
        run.decisions.window, run.decisions.window_reason = said, "why"
        decision_log.window(core, run, all_done, {"samples": 7.0})
        codes += [row.code for row in told(core)]
    assert codes == ["opened", "closed", "all_done", "undecided"]


def test_how_many_engines_are_wanted_is_told_when_it_changes() -> None:
    core, run = core_and_run()
    for number in (3, 3, 3, 2, 2):
        decision_log.engines(core, run, number, f"{number} are useful", Benefit(0.1, 8.0, 1, 60.0))
    rows = told(core)
    assert [(row.reason, json.loads(row.inputs)["before"]) for row in rows] == [
        ("3 are useful", None),
        ("2 are useful", 3),
    ]
    assert json.loads(rows[0].inputs)["by"] == {
        "saving": 0.1,
        "run_gpus": 8.0,
        "gpus": 1,
        "start_s": 60.0,
        "price": 1.0,
        "curve": [],
    }


def test_moves_of_a_step_s_tail_have_a_word_of_their_own() -> None:
    core, run = core_and_run()
    decision_log.moved(core, run, [SampleMove(7, 1, 2, "worker 1 is emptied", merges=True)])
    assert [row.code for row in told(core)] == ["merged"]


def test_a_predicting_daemon_s_run_is_explained_by_its_decisions() -> None:
    """The core with the policy that is on by default: window, placement and the number of engines are told."""
    bench = Bench()
    bench.router.core.new_policy = named("predictive")
    bench.open()
    bench.publish()
    bench.join(11, kind="reserved")
    bench.submit(groups=specs(3))
    (demand,) = bench.router.demand(bench.now)
    bench.tick(0.25)
    assert isinstance(bench.router.core.runs["r"].policy, Predictive)
    rows = [r for r in bench.ledger.log if isinstance(r, rec.Decision)]
    assert {row.policy for row in rows} == {"placement", "window", "engines"}
    assert all(row.code and row.reason and json.loads(row.inputs) for row in rows)
    opened = next(json.loads(row.inputs)["by"] for row in rows if row.policy == "window")
    assert opened["reserved"] == 1
    assert {
        "samples",
        "harvested",
        "train_s",
        "round_s",
        "sleep_s",
        "decode_s",
        "lost_per_h",
    } <= opened.keys()
    assert next(row.reason for row in rows if row.policy == "engines") == demand.reason
    wanted = next(json.loads(row.inputs) for row in rows if row.policy == "engines")
    assert demand.benefit is not None
    assert wanted["by"]["saving"] == demand.benefit.saving
    assert {"useful", "step_s", "alone_s", "saving", "needed", "expected_life_s", "freed"} <= wanted[
        "sized"
    ].keys()
    assert wanted["sized"]["step_s"] <= wanted["sized"]["alone_s"]


def placed_and_moved(new: NewPolicy) -> dict[str, rec.Decision]:
    """The rows of a run whose second engine comes when the first holds all samples."""
    bench = Bench(limits=RouterLimits(suspect_s=300.0, dead_s=600.0))
    bench.router.core.new_policy = new
    spec = msgspec.structs.replace(SPEC, max_batch=64, context_length=32_768)
    bench.call(msgspec.structs.replace(open_body(), engine=spec))
    bench.attempt += 1
    bench.publish()
    bench.submit(groups=specs(8, 8, max_tokens=16_000))
    bench.join(11)
    bench.tick(0.25)
    bench.join(12)
    bench.tick(30.0, step=1.0)
    rows = [r for r in bench.ledger.log if isinstance(r, rec.Decision)]
    return {row.policy: row for row in reversed(rows)}


GUARDED = with_fallback(named("predictive"), lambda run, error: pytest.fail(f"{run}: {error!r}"))


@pytest.mark.parametrize("new", [named("predictive"), GUARDED], ids=["bare", "as in the daemon"])
def test_placements_and_moves_tell_what_they_were_reckoned_with(new: NewPolicy) -> None:
    rows = placed_and_moved(new)
    placed, moved = (json.loads(rows[policy].inputs) for policy in ("placement", "rebalance"))
    assert placed["samples"] == 64
    assert sum(placed["reasons"].values()) == 64
    assert placed["reasons"] == {"longest expected": 56, "oldest": 8}
    by = placed["by"]
    assert 0 < by["longest_expected"] <= 16_000
    assert 64 * by["longest_expected"] >= by["expected_tokens"] > by["longest_expected"]
    assert (by["order"], by["limit"], by["leases"]) == ("longest first", "all samples at a time", 0)
    assert by["step_s"] > by["sample_s"] > by["token_s"] > 0
    by = moved["by"]
    assert rows["rebalance"].code == "moved"
    assert moved["samples"] > len(moved["moves"]) == decision_log.NAMED
    assert by["cost_s"] >= moved["samples"] * by["transfer_s"] > 0
    assert by["margin"] == PredictiveSettings().margin
    assert (by["from_leases"], by["to_leases"]) == (64, 0)
    assert by["looked_at"] >= 1000.25


def test_being_asked_for_reasons_changes_no_decision() -> None:
    scenario = small(2, 2)
    mute = replace(OURS, new_policy=lambda: Mute(OURS.new_policy()))
    assert replace(simulate(scenario, OURS), decisions={}) == replace(simulate(scenario, mute), decisions={})


class Mute:
    """A policy that explains nothing."""

    def __init__(self, policy: RouterPolicy) -> None:
        self.every_s, self.place, self.rebalance = policy.every_s, policy.place, policy.rebalance
        self.window, self.engines, self.observe = policy.window, policy.engines, policy.observe


def test_why_all_moves_were_made_stands_before_the_first_one_s_reason() -> None:
    core, run = core_and_run()
    whole = "1 engines are emptied by 2 moves"
    decision_log.moved(
        core,
        run,
        [SampleMove(n, 1, 2, "worker 1 is emptied", merges=True, gain_s=0.5, whole=whole) for n in (7, 8)],
    )
    [row] = told(core)
    assert row.reason == f"{whole}: worker 1 is emptied (and 1 more samples)"
    assert json.loads(row.inputs)["gain_s"] == 1.0


def test_what_is_left_out_of_the_ledger_is_not_made() -> None:
    core, run = core_and_run()
    policy = Asked()
    run.policy = policy
    for _ in range(1000):
        decision_log.placed(core, run, [SamplePlacement(4, 1, "longest")])
    assert policy.asked == len(told(core)) == BURST


class Asked(Standard):
    asked = 0

    def placed_by(self, answers: Sequence[SamplePlacement]) -> Inputs:
        self.asked += 1
        return {}

    def sized_by(self) -> Inputs:
        return {}

    def moved_by(self, moves: Sequence[SampleMove]) -> Inputs:
        return {}


def test_each_run_has_a_policy_of_its_own() -> None:
    router = Router(RouterLimits(), 1, NoPayloads(), new_policy=named("predictive", 0.0))
    one, two = router.core.new_policy("a"), router.core.new_policy("b")
    assert one is not two
    assert isinstance(one, Predictive)
    assert one.settings.price == 0.0
