"""Whom the ends of engines blame: nodes, runs, owners or the set-up; and how long what is blamed waits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scavenger.cluster.model import JobState
from scavenger.harvest.track import set_up
from scavenger.harvest.track.node_health import MAX_SENTENCE, Health, without_failing
from scavenger.harvest.track.tracker import Output, Tracker
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from scavenger.router.core.events import CondemnedEngine, WorkerLife
from tests.harvest.views import intended, ours
from tests.harvest.watch import RULES, A, B, Watch, running


def fails_thrice(exit_code: int) -> tuple[Watch, list[float]]:
    """Three jobs on one node that end so after a second, the last at 32; and the back-off after each."""
    w, waits = Watch(), []
    for n, at in enumerate((0.0, 10.0, 30.0)):
        intent = f"scv-{n:016x}"
        w.submit(intent, n + 1, at)
        w.see(
            at + 2,
            ours(
                intent,
                n + 1,
                JobState.FAILED,
                exit_code=exit_code,
                nodes=("node2",),
                start_time=at + 1,
                end_time=at + 2,
            ),
        )
        waits.append(w.tracker.health.backoff()[0] - (at + 2))
    return w, waits


def test_jobs_that_die_at_once_back_off_and_then_their_node_is_quarantined() -> None:
    w, waits = fails_thrice(1)
    assert waits == [5.0, 10.0, 20.0]
    [(name, reason)] = w.tracker.health.quarantined(32.0)
    assert name == "node2"
    assert "3 engines died" in reason
    assert "exit code 1" in reason
    events = [(e.kind, e.subject) for e in w.of(rec.Event) if e.kind.startswith("node")]
    assert events == [("node_quarantined", "node2")]
    w.see(32.0 + 601)
    assert [e.kind for e in w.of(rec.Event)][-1] == "node_released"


def test_jobs_of_another_release_back_off_and_blame_no_node() -> None:
    w, waits = fails_thrice(78)
    assert waits[-1] == 20.0
    assert not w.tracker.health.quarantined(32.0)


@pytest.mark.parametrize("code", [70, 72])
def test_engines_that_cannot_begin_blame_the_set_up_and_no_node(code: int) -> None:
    """Also on a site's only node, and from the first on: a Python without torch is on every node the same."""
    w, waits = fails_thrice(code)
    health = w.tracker.health
    assert waits == [5.0, 10.0, 20.0]
    assert not health.quarantined(32.0)
    reason = health.backoff()[1]
    assert reason == health.set_up_fault()
    assert "engines cannot start, 3 in a row, and no node is blamed" in reason
    assert f"job 3 on node2 after 1 s: {set_up.CANNOT_BEGIN[code]} (exit code {code})" in reason
    assert "Remedy: mend what the job's log names; `scavenger doctor --submit`" in reason
    assert health.doubted(32.0) == {"node2"}
    assert not [e for e in w.of(rec.Event) if e.kind == "node_quarantined"]


def started(w: Watch, n: int, at: float, name: str, run_id: int = 1, **ends: Any) -> Output:
    """One more engine on a node; with `ends` it is over by then."""
    intent = f"scv-{n:016x}"
    w.tracker.intend(replace_run(intended(intent, at), run_id), at)
    w.keep(w.tracker.submitted(intent, n, at))
    if not ends:
        return w.see(at + 1, running(intent, n, nodes=(name,), start_time=at))
    how: dict[str, Any] = {"nodes": (name,), "start_time": at, "end_time": at + 1, **ends}
    return w.see(at + 1, ours(intent, n, JobState.FAILED, **how))


def replace_run(one: rec.JobIntended, run_id: int) -> rec.JobIntended:
    return msgspec.structs.replace(one, run_id=run_id)


def test_a_node_where_engines_cannot_begin_is_quarantined_once_those_that_started_elsewhere_since_work() -> (
    None
):
    """Its file system is not mounted, say: that is said before the daemon is asked anything, and is no refusal of the daemon's."""
    w = Watch()
    started(w, 1, 0.0, "node1")
    w.tracker.works(
        [f"scv-{1:016x}"]
    )  # it has what it needs; whether what is installed now would do, it does not show
    for n in (2, 3, 4):
        started(w, n, 10.0 * n, "node2", exit_code=72)
    assert not w.tracker.health.quarantined(42.0)
    started(w, 5, 50.0, "node1")
    w.tracker.heard([WorkerLife(f"scv-{5:016x}", 0, "node1", 50.0, 51.0, here=True, ready=True)])
    assert w.tracker.health.set_up_fault() == ""
    started(w, 6, 60.0, "node2", exit_code=72)
    [(name, reason)] = w.tracker.health.quarantined(62.0)
    assert name == "node2"
    assert "4 engines died" in reason
    assert "exit code 72" in reason


def test_an_engine_that_works_where_others_could_not_begin_acquits_the_node() -> None:
    w = Watch()
    for n in (2, 3, 4):
        started(w, n, 10.0 * n, "node2", exit_code=70)
    started(w, 5, 50.0, "node2")
    w.tracker.works([f"scv-{5:016x}"])
    assert (w.tracker.health.backoff(), w.tracker.health.set_up_fault()) == ((0.0, ""), "")
    assert not w.tracker.health.doubted(60.0)


def test_an_engine_that_worked_and_then_failed_is_its_node_s_affair() -> None:
    w = Watch()
    for n in (1, 2, 3):
        started(w, n, 10.0 * n, "node2")
        w.tracker.works([f"scv-{n:016x}"])
        how: dict[str, Any] = {"exit_code": 70, "nodes": ("node2",), "start_time": 10.0 * n}
        w.see(10.0 * n + 5, ours(f"scv-{n:016x}", n, JobState.FAILED, end_time=10.0 * n + 5, **how))
    assert [name for name, _ in w.tracker.health.quarantined(36.0)] == ["node2"]
    assert w.tracker.health.set_up_fault() == ""


def test_an_engine_that_no_daemon_answered_holds_everybody_s_back_for_ten_minutes() -> None:
    """Each further one would hold its GPU for a quarter of an hour first; living for long proves nothing here."""
    w = Watch()
    output = started(w, 1, 1.0, "node1", exit_code=69)
    assert [(one.code, one.node) for one in output.failed_starts] == [(69, "node1")]
    health = w.tracker.health
    not_before, why = health.backoff()
    assert not_before == 602.0
    assert "no daemon answered it (exit code 69)" in why
    assert "daemon.advertise" in why
    assert health.on_trial(1) == health.on_trial(2) == why, "the address is every run's"
    started(w, 2, 700.0, "node1", run_id=2)
    w.see(800.0, running(f"scv-{2:016x}", 2, nodes=("node1",), start_time=700.0))
    assert health.set_up_fault() == why
    health.set_up_changed()
    assert (health.backoff(), health.on_trial(1)) == ((0.0, ""), "")


def test_an_engine_that_lost_a_daemon_which_it_had_found_blames_nothing() -> None:
    w = Watch()
    started(w, 1, 0.0, "node1")
    w.tracker.heard([WorkerLife(f"scv-{1:016x}", 0, "node1", 0.5, 30.0)])
    how: dict[str, Any] = {"exit_code": 69, "nodes": ("node1",), "start_time": 0.0, "end_time": 930.0}
    w.see(931.0, ours(f"scv-{1:016x}", 1, JobState.FAILED, **how))
    w.tracker.restore([rec.OpenIntent(intended(A), 5, "PENDING", 0, "", False)], 940.0)
    how |= {"start_time": 941.0, "end_time": 1841.0}
    w.see(1842.0, ours(A, 5, JobState.FAILED, **how))
    assert len([event for event in w.of(rec.Event) if event.kind == "engine_died"]) == 2
    assert (w.tracker.health.backoff(), w.tracker.health.quarantined(1842.0)) == ((0.0, ""), ())


def test_what_the_log_of_an_engine_ended_with_belongs_to_the_reason() -> None:
    w = Watch()
    (failed,) = started(w, 1, 1.0, "node1", exit_code=70).failed_starts
    w.tracker.health.explain(failed, "engine 'vllm' cannot be imported: No module named 'vllm'")
    assert "(exit code 70): engine 'vllm' cannot be imported: No module" in w.tracker.health.backoff()[1]


def test_one_run_that_cannot_begin_holds_up_no_other_owner() -> None:
    w = Watch()
    w.tracker.health.owners, w.tracker.health.asking = {1: "ada", 2: "bob"}, {1, 2}
    for n in (2, 3, 4):
        started(w, n, 10.0 * n, "node2", run_id=1, exit_code=70)
    assert w.tracker.health.backoff() == (0.0, "")
    assert w.tracker.health.on_trial(1)
    assert not w.tracker.health.on_trial(2)


def wanted_beside(w: Watch, now: float, engines: int = 8) -> int:
    """Engines of run 1 that may be there, of so many that are wanted."""
    [found] = without_failing(
        w.tracker.health, [Demand(1, "run-1", engines, 1, "useful")], w.tracker.jobs({}), now
    )
    return found.engines


@pytest.mark.parametrize("code", [70, 72])
def test_one_bad_node_does_not_freeze_a_fleet_that_works(code: int) -> None:
    """An engine is tried beside those that run, and another only once this one has failed or worked."""
    w = Watch()
    beside = [running(f"scv-{n:016x}", n, nodes=("node1",), start_time=1.0) for n in (1, 2, 3)]
    for n in (1, 2, 3):
        w.tracker.intend(intended(f"scv-{n:016x}", 0.0), 0.0)
        w.keep(w.tracker.submitted(f"scv-{n:016x}", n, 0.0))
    w.see(2.0, *beside)
    w.tracker.works([f"scv-{n:016x}" for n in (1, 2, 3)])
    assert wanted_beside(w, 3.0) == 8
    bad = f"scv-{4:016x}"
    w.tracker.intend(intended(bad, 10.0), 10.0)
    w.keep(w.tracker.submitted(bad, 4, 10.0))
    how: dict[str, Any] = {"nodes": ("node2",), "start_time": 11.0, "end_time": 12.0, "exit_code": code}
    w.see(12.0, *beside, ours(bad, 4, JobState.FAILED, **how))
    assert w.tracker.health.backoff()[0] == 17.0
    assert wanted_beside(w, 100.0) == 4, "a trial"
    trial = f"scv-{5:016x}"
    w.tracker.intend(intended(trial, 100.0), 100.0)
    w.keep(w.tracker.submitted(trial, 5, 100.0))
    w.see(101.0, *beside, ours(trial, 5))
    assert wanted_beside(w, 101.0) == 4, "it waits"
    w.see(105.0, *beside, running(trial, 5, nodes=("node3",), start_time=104.0))
    assert wanted_beside(w, 106.0) == 4, "it has not worked yet"
    w.tracker.works([trial])
    assert wanted_beside(w, 107.0) == 8


def test_a_set_up_that_failed_long_ago_is_tried_afresh() -> None:
    w = Watch()
    started(w, 1, 10.0, "node2", exit_code=72)
    memory_s = MAX_SENTENCE * RULES.health.quarantine_s
    assert wanted_beside(w, memory_s + 10.0) == 1
    assert wanted_beside(w, memory_s + 11.0) == 8
    assert w.tracker.health.set_up_fault() == ""


def test_jobs_of_a_daemon_before_the_upgrade_are_refused_and_hold_nothing_up() -> None:
    """Each that waited starts, finds another release than it was submitted for, and leaves; what is submitted since is of ours."""
    w = Watch()
    again = rec.OpenIntent(intended(B), 6, "PENDING", 1, "", False, last_allocation=0)
    w.tracker.restore([rec.OpenIntent(intended(A), 5, "PENDING", 0, "", False), again], 100.0)
    ended: dict[str, Any] = {"nodes": ("node2",), "start_time": 100.5, "end_time": 101.0}
    w.see(
        102,
        ours(A, 5, JobState.FAILED, exit_code=78, **ended),
        ours(B, 6, JobState.FAILED, exit_code=78, restart_count=1, **ended),
    )
    assert len([event for event in w.of(rec.Event) if event.kind == "engine_died"]) == 2, "they did end so"
    assert w.tracker.health.backoff() == (0.0, "")
    w.tracker.restore([rec.OpenIntent(intended(A), 7, "PENDING", 0, "", False)], 110.0)
    w.see(112, ours(A, 7, JobState.FAILED, exit_code=1, nodes=("node2",), start_time=110.5, end_time=111.0))
    assert w.tracker.health.backoff()[0] == 117.0, "one that dies of something else does count"


def test_deaths_far_apart_do_not_quarantine() -> None:
    health = Health(RULES.health)
    assert [health.died("node1", "x", at) for at in (0.0, 400.0, 700.0, 1100.0)] == [""] * 4


def test_a_node_that_goes_on_killing_is_out_for_longer_each_time_and_is_forgiven_in_time() -> None:
    health = Health(RULES.health)

    def sentence(start: float) -> float:
        for at in (start, start + 1, start + 2):
            health.died("node1", "x", at)
        return next(s for s in range(0, 10_000, 100) if not health.quarantined(start + 2 + s))

    assert sentence(0.0) == 600
    assert sentence(700.0) == 1200
    assert sentence(2000.0) == 2400
    assert sentence(100_000.0) == 600


def broken_on(health: Health, run_id: int, *nodes: str, at: float = 0.0, times: int = 3) -> None:
    for n in range(times):
        for name in nodes:
            health.died(name, "x", at + n, run_id)


def test_a_run_that_dies_everywhere_blames_no_node_and_frees_the_one_that_was_blamed() -> None:
    health = Health(RULES.health)
    broken_on(health, 1, "node1")
    assert [name for name, _ in health.quarantined(3.0)] == ["node1"], "it may be the node"
    broken_on(health, 1, "node2", at=5.0)
    assert not health.quarantined(8.0)
    broken_on(health, 3, "node4", at=9.0, times=1)
    broken_on(health, 3, "node5", at=10_000.0)
    assert [name for name, _ in health.quarantined(10_003.0)] == ["node5"], "hours lie between"
    health = Health(RULES.health)
    broken_on(health, 2, "node3", at=10.0)
    assert [name for name, _ in health.quarantined(13.0)] == ["node3"], "another run's deaths count"


def test_many_broken_runs_of_one_owner_are_as_one_and_two_owners_blame_a_node() -> None:
    health = Health(RULES.health)
    health.owners = {1: "ada", 2: "ada", 3: "ada", 4: "bob"}
    for run, name in ((1, "node1"), (2, "node2"), (3, "node1"), (1, "node2"), (2, "node1"), (3, "node2")):
        assert health.died(name, "x", float(run), run) == ""
    for run in (4, 1, 4, 4):
        health.died("node1", "x", 10.0, run)
    assert [name for name, _ in health.quarantined(11.0)] == ["node1"]


def test_nodes_are_to_blame_for_the_deaths_of_a_run_that_worked() -> None:
    health = Health(RULES.health)
    health.proved(0.0, 1)
    broken_on(health, 1, "node1", "node2")
    assert [name for name, _ in health.quarantined(3.0)] == ["node1", "node2"]


def names(health: Health, now: float) -> list[str]:
    return [name for name, _ in health.quarantined(now)]


def test_a_run_that_worked_and_then_dies_everywhere_closes_no_node() -> None:
    """Its engines may die of what it publishes: of a tokenizer, say."""
    health = Health(RULES.health)
    health.owners = {1: "mallory", 2: "alice"}
    health.proved(0.0, 1, "n00", worked=True)
    nodes = [f"n{n:02}" for n in range(20)]
    for n, name in enumerate(nodes):
        broken_on(health, 1, name, at=100.0 + 3 * n)
        assert len(names(health, 103.0 + 3 * n)) <= 2
    assert not health.quarantined(160.0)
    assert health.doubted(160.0) == set(nodes), "they are tried last"
    over = 160.0 + RULES.health.quarantine_s
    assert not health.doubted(over)
    broken_on(health, 1, "n07", at=over)
    assert names(health, over + 3.0) == ["n07"], "one node alone is to blame again"


def test_deaths_in_the_runs_of_one_owner_keep_two_nodes_from_others_at_most() -> None:
    health, quarantine_s = Health(RULES.health), RULES.health.quarantine_s
    health.owners = {1: "mallory", 2: "mallory", 3: "alice"}
    health.proved(0.0, 1)
    health.proved(0.0, 2)
    closed, held = dict.fromkeys((f"n{n:02}" for n in range(16)), 0), []
    for turn in range(100):
        now = 100.0 + turn * (quarantine_s + 3.0)
        free = closed.keys() - set(names(health, now))
        for n, name in enumerate(sorted(free, key=lambda name: (-closed[name], name))[:2]):
            broken_on(health, 1 + n, name, at=now)
            closed[name] += 1
        held.append(len(health.quarantined(now + 3.0)))
    assert max(held) == 2


def test_many_nodes_are_to_blame_where_engines_of_two_owners_die_on_each() -> None:
    health = Health(RULES.health)
    health.owners = {1: "ada", 2: "bob"}
    health.proved(0.0, 1)
    health.proved(0.0, 2)
    nodes = ["node1", "node2", "node3", "node4"]
    for run in (1, 2, 1):
        broken_on(health, run, *nodes, at=float(run), times=1)
    assert names(health, 4.0) == nodes


def test_a_node_on_which_another_owner_s_engine_died_too_stays_closed() -> None:
    health = Health(RULES.health)
    health.owners = {1: "ada", 2: "bob"}
    health.proved(0.0, 1)
    health.proved(0.0, 2)
    broken_on(health, 1, "node1", "node2")
    broken_on(health, 2, "node1", at=5.0, times=1)
    broken_on(health, 1, "node3", at=6.0)
    assert names(health, 9.0) == ["node1"]


def test_deaths_of_an_owner_whose_engines_die_everywhere_do_not_add_to_another_s() -> None:
    health = Health(RULES.health)
    health.owners = {1: "mallory", 2: "alice"}
    health.proved(0.0, 1)
    health.proved(0.0, 2)
    broken_on(health, 1, "node1", "node2", "node3")
    broken_on(health, 2, "node4", at=5.0, times=1)
    broken_on(health, 1, "node4", at=6.0)
    assert not health.quarantined(9.0)
    broken_on(health, 2, "node4", at=10.0, times=2)
    assert names(health, 12.0) == ["node4"], "alice's own count"


def test_an_owner_whose_jobs_die_at_once_waits_alone() -> None:
    health = Health(RULES.health)
    health.owners, health.asking = {1: "ada", 2: "ada", 3: "bob"}, {1, 2, 3}
    health.failed_at_once("x", 100.0, 1)
    assert (health.backoff(), health.backoff_of(2)[0], health.backoff_of(3)) == ((0.0, ""), 105.0, (0.0, ""))
    health.failed_at_once("x", 101.0, 3)
    assert health.backoff()[0] == 105.0, "all wait: the first of them ends it"
    health.failed_at_once("submission refused: x", 102.0)
    assert health.backoff()[0] == 107.0, "that concerns everybody"
    health.proved(103.0, 3)
    assert (health.backoff(), health.backoff_of(3), health.backoff_of(1)[0]) == ((0.0, ""), (0.0, ""), 105.0)


def test_only_an_engine_that_started_after_the_last_failure_ends_the_back_off() -> None:
    health = Health(RULES.health)
    health.failed_at_once("x", 100.0)
    health.proved(50.0)
    assert health.backoff()[0] == 105.0
    health.proved(106.0)
    assert health.backoff() == (0.0, "")


def test_the_back_off_is_bounded() -> None:
    health = Health(RULES.health)
    for _ in range(50):
        health.failed_at_once("x", 0.0)
    assert health.backoff()[0] == 600.0


def test_a_refused_submission_ends_its_intent_and_backs_off() -> None:
    w = Watch()
    w.submit(A, 0)
    output = w.keep(w.tracker.submit_refused(A, "invalid account", 3))
    assert output.ended == (A,)
    assert w.tracker.health.backoff()[0] == 8.0
    assert w.tracker.jobs({}) == []


def test_a_node_where_an_engine_computes_wrong_gets_no_engines_and_is_named_with_the_reason() -> None:
    w = Watch()
    tracker = w.tracker
    w.submit(A, 1)
    w.see(60.0, running(start_time=50.0))
    wrong = [CondemnedEngine(1, A, 0, 4, "its logprobs disagree", 0.0)]
    tracker.condemned(wrong, 100.0)
    (quarantined,) = tracker.health.quarantined(100.0)
    assert quarantined[0] == "node1"
    assert "an engine on it was set aside: its logprobs disagree" in quarantined[1]
    over = 101.0 + RULES.health.quarantine_s
    tracker.condemned(wrong, over)
    assert not tracker.health.quarantined(over), "each is heard once"
    tracker.condemned([*wrong, CondemnedEngine(2, A, 0, 4, "again", over)], over)
    assert tracker.health.quarantined(over + 1.5 * RULES.health.quarantine_s), "twice as long"


def test_the_node_that_is_charged_is_where_slurm_ran_that_life_whatever_its_engine_says() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, running(start_time=50.0))
    w.tracker.heard([WorkerLife(A, 0, "somebody-elses", 55.0, 59.0)])
    w.see(70.0, ours(A, 1, restart_count=1, reason="BeginTime"))
    w.see(90.0, running(restart_count=1, nodes=("node2",), start_time=80.0))
    w.tracker.condemned([CondemnedEngine(1, A, 7, 4, "of a life that was not", 95.0)], 95.0)
    assert not w.tracker.health.quarantined(95.0)
    w.tracker.condemned([CondemnedEngine(2, A, 0, 4, "its logprobs disagree", 100.0)], 100.0)
    assert [node for node, _ in w.tracker.health.quarantined(100.0)] == ["node1"], (
        "its second life is elsewhere"
    )
    again = Tracker(RULES)
    again.restore([rec.OpenIntent(intended(A, 10.0), 1, "RUNNING", 1, "node2", True, 80.0, 1)], 200.0)
    again.condemned([CondemnedEngine(1, A, 1, 4, "after a restart", 201.0)], 201.0)
    assert [node for node, _ in again.health.quarantined(201.0)] == ["node2"]


def test_the_word_of_one_owner_keeps_two_nodes_from_others_at_most() -> None:
    """However patient its trainer is: an accusation stands for as long as it costs others the node."""
    health, quarantine_s = Health(RULES.health), RULES.health.quarantine_s
    health.owners = {4: "mallory"}
    accused, held = dict.fromkeys((f"n{n:02}" for n in range(16)), 0), []
    for turn in range(100):
        now = 100.0 + turn * (quarantine_s + 1.0)
        out = {name for name, _ in health.quarantined(now)}
        for name in sorted(accused.keys() - out, key=lambda name: (-accused[name], name))[:2]:
            health.condemned(name, "disagrees", now, 4)
            accused[name] += 1
        held.append(len(health.quarantined(now)))
    assert max(held) == 2


def test_accusations_lengthen_no_quarantine_for_deaths() -> None:
    health, quarantine_s = Health(RULES.health), RULES.health.quarantine_s
    health.owners = {4: "mallory", 5: "alice"}
    now = 100.0
    for _ in range(4):
        health.condemned("n1", "disagrees", now, 4)
        now = health.quarantined_until("n1") + 1.0
    assert health.quarantined_until("n1") - 100.0 > (1 + 2 + 4 + 8) * quarantine_s, "its own word counts"
    health.condemned("n1", "disagrees", now, 5)
    assert health.quarantined_until("n1") == now + quarantine_s, "another owner's does not"
    now = health.quarantined_until("n1") + 1.0
    for n in range(3):
        health.died("n1", "x", now + n)
    assert health.quarantined_until("n1") == now + 2 + quarantine_s


def test_an_owner_whose_trainers_accuse_every_node_is_not_believed() -> None:
    """A trainer's word costs others the node: it is good for two."""
    health = Health(RULES.health)
    health.owners = {4: "mallory", 5: "alice"}
    health.condemned("n9", "disagrees", 99.0, 5)
    assert health.condemned("n1", "disagrees", 100.0, 4)
    assert health.condemned("n2", "disagrees", 101.0, 4)
    assert not health.condemned("n3", "disagrees", 102.0, 4)
    assert not health.condemned("n9", "disagrees", 103.0, 4)
    assert [node for node, _ in health.quarantined(104.0)] == ["n9"], "alice's stands"
    assert health.condemned("n1", "disagrees", 104.0 + RULES.health.quarantine_s, 4), (
        "and after a while again"
    )
