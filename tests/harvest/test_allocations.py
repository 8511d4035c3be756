"""Allocations under coarse polling (60 and 15 s): lives that no look saw, a silent slurmctld, a restarted daemon. Short logs of views."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scavenger.cluster.model import Job, JobFlag, JobLife, JobState
from scavenger.harvest.decide.decide import DrainKind
from scavenger.ledger import records as rec
from scavenger.router.core.events import WorkerLife
from tests.harvest.views import intended, ours
from tests.harvest.watch import RULES, A, Watch, running

B, C, D = (f"scv-{n:016x}" for n in (11, 12, 13))


def back(
    intent_id: str = A, job_id: int = 1, restarts: int = 1, put_back_at: float = 0.0, **more: Any
) -> Job:
    """A job that was preempted and waits: Slurm says when it was put back, which is when its last life ended."""
    fields: dict[str, Any] = {
        "reason": "BeginTime",
        "submit_time": put_back_at,
        "start_time": put_back_at + 121.0,
    }
    return ours(intent_id, job_id, restart_count=restarts, **(fields | more))


def engine(
    at: float, seen_at: float, incarnation: int = 0, intent_id: str = A, node: str = "node2"
) -> WorkerLife:
    return WorkerLife(intent_id, incarnation, node, at, seen_at)


def spans(w: Watch) -> list[tuple[int, str, float, float, str]]:
    """(restart count, node, from, to, why) of each allocation that ended, as the ledger's statements would have it."""
    found: dict[tuple[str, int], tuple[int, str, float, float, str]] = {}
    for record in w.records:
        match record:
            case rec.AllocationStarted():
                key = (record.intent_id, record.restart_count)
                assert key not in found, "an allocation is recorded once"
                found[key] = (record.restart_count, record.node, record.at, -1.0, "")
            case rec.AllocationEnded():
                key = (record.intent_id, record.restart_count)
                found[key] = (*found[key][:3], record.at, record.reason)
            case rec.AllocationCorrected() as one:
                found[(one.intent_id, one.restart_count)] = (
                    one.restart_count,
                    one.node,
                    one.started_at,
                    one.ended_at,
                    one.reason,
                )
    return [found[key] for key in sorted(found)]


def bounds(w: Watch) -> list[dict[str, Any]]:
    return [json.loads(event.detail) for event in w.of(rec.Event) if event.kind == "allocation_bounded"]


# ---------------------------------------------------------------- lives that no look saw


def test_of_four_engines_preempted_at_once_each_has_its_allocation_and_its_preemption() -> None:
    """Seen at a site: two of them had started since the last look, and had no row at all."""
    w = Watch()
    for n, intent in enumerate((A, B, C, D), 1):
        w.submit(intent, n)
    first = [running(A, 1, start_time=5.0), running(B, 2, start_time=6.0), ours(C, 3), ours(D, 4)]
    w.see(60.0, *first)
    w.tracker.heard([engine(80.0, 99.0, 0, C), engine(81.0, 98.0, 0, D, "node3")])
    w.see(120.0, *(back(intent, n, 1, 100.0) for n, intent in enumerate((A, B, C, D), 1)))
    assert spans(w) == [
        (0, "node1", 5.0, 100.0, "preempted"),
        (0, "node1", 6.0, 100.0, "preempted"),
        (0, "node2", 80.0, 100.0, "preempted"),
        (0, "node3", 81.0, 100.0, "preempted"),
    ]
    assert w.tracker.preempted_since(0.0) == 4
    assert sorted(w.gone) == [(intent, 0, False) for intent in (A, B, C, D)]
    assert [one["start"] for one in bounds(w)] == [[60.0, 80.0], [60.0, 81.0]], (
        "and what is not known of it is said"
    )


def test_a_life_of_which_only_the_restart_count_tells_is_recorded_with_its_end_and_its_bounds() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, ours(A, 1))
    w.see(120.0, back(put_back_at=100.0))
    assert spans(w) == [(0, "", 100.0, 100.0, "preempted")], "nothing of it is certain but its end"
    assert bounds(w) == [{"job_id": 1, "restart_count": 0, "start": [60.0, 100.0], "end": [100.0, 100.0]}]
    w.see(240.0, running(restart_count=1, start_time=225.0))
    assert spans(w)[1][:3] == (1, "node1", 225.0)


@pytest.mark.parametrize("seen", [0, 1])
def test_each_growth_of_the_restart_count_is_one_preemption(seen: int) -> None:
    """`seen`: whether its first life was, before it came and went thrice."""
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, running(start_time=50.0) if seen else ours(A, 1))
    w.tracker.heard([engine(300.0, 420.0, 1)])
    w.see(1000.0, running(restart_count=3, submit_time=700.0, start_time=850.0))
    assert [(n, why) for n, _, _, _, why in spans(w)] == [
        (0, "preempted"),
        (1, "preempted"),
        (2, "preempted"),
        (3, ""),
    ]
    assert spans(w)[1] == (1, "node2", 300.0, 420.0, "preempted"), "its engine was heard from then to then"
    assert spans(w)[2][3] == 700.0, "Slurm says when the last one ended"
    assert spans(w)[3][2] == 850.0
    assert w.tracker.preempted_since(0.0) == 3
    assert all(a[3] <= b[2] for a, b in zip(spans(w), spans(w)[1:], strict=False)), (
        "lives of a job do not overlap"
    )


def test_an_engine_does_not_say_where_a_job_ran_that_was_submitted_for_one_node() -> None:
    w = Watch()
    w.tracker.intend(intended(A, 0.0, pinned="node7"), 0.0)
    w.tracker.submitted(A, 1, 0.0)
    w.see(60.0, ours(A, 1))
    w.tracker.heard([engine(70.0, 90.0, node="somebody-elses")])
    w.see(120.0, back(put_back_at=100.0))
    assert [node for _, node, *_ in spans(w)] == ["node7"]


def test_a_count_that_cannot_be_is_no_flood_of_rows() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, back(restarts=2_000_000_000, put_back_at=50.0))
    assert len(spans(w)) == 100


def test_a_job_that_we_asked_to_leave_and_that_was_put_back_unseen_was_not_preempted() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, ours(A, 1))
    w.tracker.revoke(A, DrainKind.DRAINING, "no demand", 70.0)
    w.see(120.0, back(put_back_at=100.0))
    assert [why for *_, why in spans(w)] == ["requeued"]


def test_a_preempted_job_that_never_comes_back_and_was_never_seen_to_run_has_its_allocation() -> None:
    """PreemptMode=CANCEL."""
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, ours(A, 1))
    w.see(120.0, ours(A, 1, JobState.PREEMPTED, nodes=("node2",), start_time=70.0, end_time=110.0))
    assert spans(w) == [(0, "node2", 70.0, 110.0, "preempted")]


def test_a_job_cancelled_while_it_waited_held_nothing_though_slurm_gives_it_a_start() -> None:
    """Slurm 22.05: StartTime = EndTime = when it was cancelled, and no node."""
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, ours(A, 1))
    w.see(120.0, ours(A, 1, JobState.CANCELLED, start_time=70.0, end_time=70.0))
    assert spans(w) == []


def test_the_end_is_when_it_began_to_complete_and_not_the_look_that_saw_it_completing() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, running(start_time=50.0))
    w.see(75.0, running(start_time=50.0, flags=frozenset({JobFlag.COMPLETING})))
    w.see(90.0, back(put_back_at=62.0))
    assert spans(w) == [(0, "node1", 50.0, 62.0, "preempted")]


def test_an_engine_registered_before_the_poll_that_shows_its_job_and_slurms_clock_is_fast() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, ours(A, 1))
    w.tracker.heard([engine(70.0, 100.0)])
    w.see(120.0, running(start_time=110.0))
    assert spans(w)[0][2] == 70.0


# ---------------------------------------------------------------- silence


def test_a_job_that_ended_while_slurmctld_was_silent_ends_when_slurm_says_so() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, running(start_time=50.0))
    w.see(900.0, ours(A, 1, JobState.CANCELLED, nodes=("node1",), start_time=50.0, end_time=400.0))
    assert spans(w) == [(0, "node1", 50.0, 400.0, "cancelled")]


def test_a_job_that_slurm_has_forgotten_ended_no_sooner_than_its_engine_was_heard() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, running(start_time=50.0))
    w.tracker.heard([engine(55.0, 400.0)])
    w.see(900.0)
    w.see(960.0)
    assert spans(w) == [(0, "node1", 50.0, 400.0, "unknown")]
    assert bounds(w) == [{"job_id": 1, "restart_count": 0, "start": [50.0, 50.0], "end": [400.0, 900.0]}]


def test_a_job_that_slurm_has_forgotten_and_never_showed_running_ran_because_its_engine_registered() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, ours(A, 1))
    w.tracker.heard([engine(100.0, 400.0)])
    w.see(900.0)
    w.see(960.0)
    assert spans(w) == [(0, "node2", 100.0, 400.0, "unknown")]
    assert bounds(w)[0]["end"] == [400.0, 900.0]
    assert len(w.of(rec.JobEnded)) == 1


def test_what_one_engine_of_a_job_showed_is_no_sign_of_its_next_life() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(60.0, running(start_time=50.0))
    w.tracker.heard([engine(55.0, 80.0)])
    w.see(120.0, back(put_back_at=81.0))
    w.tracker.heard([engine(55.0, 80.0)])  # the router tells of it for long
    w.see(180.0)
    w.see(240.0)
    assert spans(w) == [(0, "node1", 50.0, 81.0, "preempted")]


# ---------------------------------------------------------------- a restarted daemon


def restored(state: rec.OpenIntent, at: float = 300.0) -> Watch:
    w = Watch()
    w.tracker.restore([state], at)
    return w


def test_a_job_that_started_while_no_daemon_ran_holds_since_slurm_started_it() -> None:
    """Seen at a site: two were clipped by two minutes, to the restart."""
    w = restored(rec.OpenIntent(intended(A, 10.0), 1, "PENDING", 0, "", False, free_since=60.0))
    w.see(301.0, running(start_time=180.0))
    assert spans(w) == [(0, "node1", 180.0, -1.0, "")]


def test_a_job_that_ended_while_no_daemon_ran_ended_when_slurm_says_so() -> None:
    w = restored(rec.OpenIntent(intended(A, 10.0), 1, "RUNNING", 0, "node1", True, 50.0, 0, polled_at=60.0))
    w.see(301.0, ours(A, 1, JobState.CANCELLED, nodes=("node1",), start_time=50.0, end_time=180.0))
    assert [(one.restart_count, one.at) for one in w.of(rec.AllocationEnded)] == [(0, 180.0)]


def test_a_job_that_was_preempted_and_runs_again_since_is_accounted_for_both_times() -> None:
    w = restored(rec.OpenIntent(intended(A, 10.0), 1, "RUNNING", 0, "node1", True, 50.0, 0, polled_at=60.0))
    w.see(301.0, running(restart_count=1, submit_time=120.0, start_time=245.0))
    assert [(one.restart_count, one.at, one.reason) for one in w.of(rec.AllocationEnded)] == [
        (0, 120.0, "preempted")
    ]
    assert [(one.restart_count, one.at) for one in w.of(rec.AllocationStarted)] == [(1, 245.0)]


def test_an_engine_that_lived_and_died_before_the_restart_and_no_look_saw_is_in_the_ledger() -> None:
    lives = (rec.EngineLife(0, "node3", 70.0, 90.0),)
    w = restored(rec.OpenIntent(intended(A, 10.0), 1, "PENDING", 0, "", False, free_since=60.0, lives=lives))
    w.see(301.0, back(put_back_at=95.0))
    assert spans(w) == [(0, "node3", 70.0, 95.0, "preempted")]


def test_an_allocation_that_ends_unseen_after_a_restart_lasted_at_least_until_the_last_look() -> None:
    w = restored(rec.OpenIntent(intended(A, 10.0), 1, "RUNNING", 2, "node1", True, 50.0, 2, polled_at=260.0))
    w.see(301.0)
    w.see(361.0)
    assert [(one.restart_count, one.at) for one in w.of(rec.AllocationEnded)] == [(2, 260.0)]


# ---------------------------------------------------------------- Slurm's accounting


def life(start: float, end: float, submit: float, state: str = "PREEMPTED", **more: Any) -> JobLife:
    fields: dict[str, Any] = {"job_id": 1, "name": A, "nodes": ("node3",), "gpus": 1}
    return JobLife(state=state, submit_time=submit, start_time=start, end_time=end, **(fields | more))


def unseen() -> Watch:
    """One life that no look saw, and a second that goes on."""
    w = Watch()
    w.submit(A, 1, 10.0)
    w.see(60.0, ours(A, 1))
    w.see(240.0, running(restart_count=1, submit_time=100.0, start_time=225.0))
    return w


LIVES = (life(70.0, 100.0, 10.0), life(225.0, 0.0, 100.0, "RUNNING"))


def test_accounting_puts_slurms_own_times_in_the_place_of_bounds() -> None:
    w = unseen()
    assert w.tracker.to_account() == (1,)
    w.keep(w.tracker.accounted((1,), LIVES, 250.0))
    assert spans(w) == [(0, "node3", 70.0, 100.0, "preempted"), (1, "node1", 225.0, -1.0, "")]
    assert w.tracker.to_account() == ()


def test_what_slurmdbd_has_not_heard_of_yet_is_asked_for_again_and_not_for_ever() -> None:
    w = unseen()
    for _ in range(5):
        assert w.keep(w.tracker.accounted((1,), (life(70.0, 0.0, 10.0, "RUNNING"),), 250.0)).records == ()
        assert w.tracker.to_account() == (1,)
    for _ in range(20):
        w.keep(w.tracker.accounted((1,), (), 250.0))
    assert w.tracker.to_account() == ()


@pytest.mark.parametrize(
    "told",
    [
        (life(70.0, 100.0, 10.0, name="theirs"),),  # the id was given out before, to another
        (life(70.0, 100.0, -4000.0),),
        (life(70.0, 100.0, 10.0, job_id=2),),
        (life(20.0, 100.0, 10.0),),  # it cannot have begun then: it was seen to wait
        (life(70.0, 200.0, 10.0),),
    ],
)
def test_accounting_of_something_else_changes_nothing(told: tuple[JobLife, ...]) -> None:
    w = unseen()
    before = spans(w)
    w.keep(w.tracker.accounted((1,), told, 250.0))
    assert spans(w) == before


def test_of_a_job_that_is_gone_accounting_says_how_it_ended() -> None:
    w = Watch(RULES)
    w.submit(A, 1, 10.0)
    w.see(60.0, running(start_time=50.0))
    w.see(900.0)
    w.see(960.0)
    w.keep(w.tracker.accounted((1,), (life(50.0, 430.0, 10.0, "TIMEOUT"),), 961.0))
    assert spans(w) == [(0, "node3", 50.0, 430.0, "timeout")]


def test_of_a_life_whose_start_slurm_lost_accounting_tells_the_end() -> None:
    """Slurm 22.05, of a preempted job whose processes had to be killed: it has a node, and its start is "Unknown"."""
    w = unseen()
    w.keep(w.tracker.accounted((1,), (life(0.0, 98.0, 10.0), LIVES[1]), 250.0))
    assert spans(w)[0] == (0, "node3", 98.0, 98.0, "preempted")


@pytest.mark.parametrize("known", [True, False])
def test_lives_of_a_job_that_nothing_here_tells_of_are_accountings_to_tell(known: bool) -> None:
    """It started, was preempted, started again and was cancelled while slurmctld was silent, and its engine never registered."""
    w = Watch()
    w.submit(A, 1, 10.0)
    w.see(60.0, ours(A, 1))
    w.see(900.0)
    w.see(960.0)
    assert spans(w) == []
    lives = (life(70.0, 100.0, 10.0), life(225.0, 300.0, 100.0, "CANCELLED"))
    if not known:
        w.keep(w.tracker.accounted((1,), (lives[0], life(225.0, 0.0, 100.0, "RUNNING")), 960.0))
        assert spans(w) == []
    w.keep(w.tracker.accounted((1,), lives, 961.0))
    assert spans(w) == [(0, "node3", 70.0, 100.0, "preempted"), (1, "node3", 225.0, 300.0, "cancelled")]
    assert w.tracker.to_account() == ()


def test_a_job_that_vanished_from_the_queue_and_never_started_held_nothing() -> None:
    w = Watch()
    w.submit(A, 1, 10.0)
    w.see(60.0, ours(A, 1))
    w.see(900.0)
    w.see(960.0)
    w.keep(w.tracker.accounted((1,), (life(0.0, 100.0, 10.0, "CANCELLED", nodes=()),), 961.0))
    assert (spans(w), w.tracker.to_account()) == ([], ())
