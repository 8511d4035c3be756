"""What of decisions reaches the ledger: changes, in bounded rows, with codes; what was left out is counted."""

from __future__ import annotations

import json

from scavenger.harvest.autoscale import Benefit
from scavenger.ledger import records as rec
from scavenger.router import telling
from scavenger.router.core import Core
from scavenger.router.machine import Router
from scavenger.router.payloads import NoPayloads
from scavenger.router.policies import named
from scavenger.router.policy import Move, Placement
from scavenger.router.predictive import Predictive
from scavenger.router.state import Limits, Run
from scavenger.router.told import BURST, EVERY_S
from tests.router.harness import SPEC, Bench, specs


def core_and_run() -> tuple[Core, Run]:
    core = Core(Limits(), 1, NoPayloads())
    core.now = 1000.0
    return core, Run(1, "r", "key", 0, SPEC)


def told(core: Core) -> list[rec.Decision]:
    return [r for action in core.finish_event() for r in getattr(action, "records", ()) if isinstance(r, rec.Decision)]


def test_a_row_for_each_answer_names_how_many_and_the_first_one_s_reason() -> None:
    core, run = core_and_run()
    telling.placed(core, run, [Placement(4, 1, None, "longest"), Placement(5, 2, None, "next"), Placement(6, 1, None, "next")])
    telling.moved(core, run, [Move(7, 1, 2, "two is idle")])
    place, move = told(core)
    assert (place.policy, place.action, place.code, place.subject) == ("placement", "lease", "placed", "sample 4")
    assert place.reason == "longest (and 2 more samples)"
    assert json.loads(place.inputs) == {"samples": 3, "by_worker": {"1": 2, "2": 1}, "bounded": 0, "run": "r"}
    assert (move.code, move.reason, json.loads(move.inputs)["moves"]) == ("moved", "two is idle", [[7, 1, 2]])


def test_placements_without_a_reason_are_not_told() -> None:
    core, run = core_and_run()
    telling.placed(core, run, [Placement(4, 1)])
    telling.moved(core, run, [])
    assert told(core) == []


def test_rows_of_one_kind_are_bounded_and_the_next_one_says_what_was_left_out() -> None:
    core, run = core_and_run()
    for _ in range(1000):
        core.now += 0.01
        telling.placed(core, run, [Placement(4, 1, None, "longest")])
    rows = told(core)
    assert BURST <= len(rows) <= BURST + 10 / EVERY_S + 1
    core.now += EVERY_S
    telling.placed(core, run, [Placement(4, 1, None, "longest")])
    (last,) = told(core)
    said = sum(json.loads(row.inputs).get("left_out", 0) for row in [*rows, last])
    assert said + len(rows) == 1000, "each answer is a row or is counted in one"


def test_one_kind_does_not_use_up_another_s_rows_nor_another_run_s() -> None:
    core, run = core_and_run()
    for _ in range(2 * BURST):
        telling.placed(core, run, [Placement(4, 1, None, "longest")])
    told(core)
    telling.moved(core, run, [Move(7, 1, 2, "idle")])
    telling.placed(core, Run(2, "other", "key", 0, SPEC), [Placement(4, 1, None, "longest")])
    assert [row.policy for row in told(core)] == ["rebalance", "placement"]


def test_the_window_s_codes_say_what_kind_of_change_it_is() -> None:
    core, run = core_and_run()
    run.newest = ("train", 3)
    codes = []
    for said, all_done in (("open", False), ("close", False), ("open", False), ("close", True), ("", False)):
        run.window, run.window_reason = said, "why"
        telling.window(core, run, all_done, {"samples": 7.0})
        codes += [row.code for row in told(core)]
    assert codes == ["opened", "closed", "reopened", "all_done", "undecided"]


def test_how_many_engines_are_wanted_is_told_when_it_changes() -> None:
    core, run = core_and_run()
    for number in (3, 3, 3, 2, 2):
        telling.engines(core, run, number, f"{number} are useful", Benefit(0.1, 8.0, 1, 60.0))
    rows = told(core)
    assert [(row.reason, json.loads(row.inputs)["before"]) for row in rows] == [("3 are useful", None), ("2 are useful", 3)]
    assert json.loads(rows[0].inputs)["by"] == {"saving": 0.1, "run_gpus": 8.0, "gpus": 1, "start_s": 60.0, "price": 1.0}


def test_moves_of_a_step_s_tail_have_a_word_of_their_own() -> None:
    core, run = core_and_run()
    telling.moved(core, run, [Move(7, 1, 2, "worker 1 is emptied", merges=True)])
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
    assert {"samples", "harvested", "train_s", "round_s", "sleep_s", "decode_s", "lost_per_h"} <= opened.keys()
    assert next(row.reason for row in rows if row.policy == "engines") == demand.reason
    wanted = next(json.loads(row.inputs) for row in rows if row.policy == "engines")
    assert demand.benefit is not None
    assert wanted["by"]["saving"] == demand.benefit.saving


def test_each_run_has_a_policy_of_its_own() -> None:
    router = Router(Limits(), 1, NoPayloads(), new_policy=named("predictive", 0.0))
    one, two = router.core.new_policy("a"), router.core.new_policy("b")
    assert one is not two
    assert isinstance(one, Predictive)
    assert one.settings.price == 0.0
