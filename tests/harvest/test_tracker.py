"""The tracker: what observations mean for jobs of ours, replayed as short logs of views."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.cluster.model import JobState
from scavenger.harvest.decide.actions import comment_of
from scavenger.harvest.decide.decide import DrainKind
from scavenger.harvest.track import observed_jobs
from scavenger.harvest.track.observed_jobs import ObservedState, Stage
from scavenger.ledger import records as rec
from tests.harvest.views import UID, intended, node, ours
from tests.harvest.watch import COMPLETING, RULES, A, B, Watch, running


@pytest.mark.parametrize("stage", [s for s in Stage if s is not Stage.ENDED])
@pytest.mark.parametrize("observed", ObservedState)
def test_every_living_stage_says_what_each_sight_means(stage: Stage, observed: ObservedState) -> None:
    assert observed_jobs.next_stage(stage, observed) is not Stage.ENDED


@pytest.mark.parametrize("observed", ObservedState)
def test_a_closed_intent_cannot_be_seen(observed: ObservedState) -> None:
    with pytest.raises(observed_jobs.IllegalStage, match="ended"):
        observed_jobs.next_stage(Stage.ENDED, observed)


@pytest.mark.parametrize("state", JobState)
def test_every_slurm_state_is_a_sight_and_a_completing_job_still_holds(state: JobState) -> None:
    assert observed_jobs.observed_state_of(ours(A, 1, state)) in ObservedState
    assert (
        observed_jobs.observed_state_of(replace(ours(A, 1, state), flags=COMPLETING))
        is ObservedState.COMPLETES
    )


def test_jobs_are_known_by_comment_or_name_and_never_those_of_another_ledger() -> None:
    assert observed_jobs.intent_in(ours(A, 1), UID) == (A, True)
    assert observed_jobs.intent_in(ours(A, 1, comment="energy=12"), UID) == (A, False)
    assert observed_jobs.intent_in(ours(A, 1, comment=comment_of("00000000", A)), UID) == ("", False)
    assert observed_jobs.intent_in(ours(A, 1, comment="", name="train"), UID) == ("", False)
    told = comment_of(UID, A, "math-1", "ada")
    assert told == f"scavenger:{UID}:{A},run=math-1,owner=ada", "whose GPUs they are, for `squeue -o %k`"
    assert observed_jobs.intent_in(ours(A, 1, comment=told, name="x"), UID) == (A, True)
    whom = comment_of(UID, A, "math-1", "ada", "hpc-help@site.org")
    assert whom == f"{told},contact=hpc-help@site.org", "whom other users ask"
    assert observed_jobs.intent_in(ours(A, 1, comment=whom, name="x"), UID) == (A, True)


# ---------------------------------------------------------------- lives


@pytest.mark.parametrize(
    ("start_time", "began"), [(607.0, 607.4), (608.0, 608.0), (606.0, 607.4), (700.0, 621.8)]
)
def test_a_hold_begins_when_slurm_says_that_it_did_though_sbatch_answered_later(
    start_time: float, began: float
) -> None:
    """Seen on Slurm: told 607, the intent durable at 607.4, sbatch answered at 608.5, first look at 621.8: 14 s were not counted.

    A clock that is not ours moves it to the nearer of the two moments that it lies between by what we saw, and not by a whole poll."""
    w = Watch()
    w.tracker.intend(intended(A, 607.4), 607.4)
    w.keep(w.tracker.submitted(A, 1, 608.5))
    w.see(621.8, running(start_time=start_time, nodes=("node1",)))
    assert [
        record.started_at if hasattr(record, "started_at") else record.at
        for record in w.of(rec.AllocationStarted)
    ] == [began]


def test_a_preempted_job_comes_back_under_the_same_id_and_is_never_a_crash() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running(start_time=0.5))
    w.see(10, running(flags=COMPLETING, reason="preempted by job 9"))
    w.see(20, ours(A, 1, restart_count=1, reason="BeginTime", submit_time=12.0, eligible_time=140.0))
    [waiting] = w.tracker.jobs({})
    assert waiting.waits
    w.see(150, running(restart_count=1, start_time=145.0))
    assert [
        (r.restart_count, r.started_at if hasattr(r, "started_at") else r.at)
        for r in w.of(rec.AllocationStarted)
    ] == [(0, 0.5), (1, 145.0)]
    assert w.ends == [(0, "preempted")]
    assert w.of(rec.AllocationEnded)[0].at == 12.0
    assert w.gone == [(A, 0, False)]
    assert w.of(rec.JobEnded) == []
    assert [r.state for r in w.of(rec.JobObserved)] == ["RUNNING", "RUNNING", "PENDING", "RUNNING"]


def test_an_engine_whose_job_completes_may_still_say_goodbye() -> None:
    """Without a GraceTime a job completes from the moment of its SIGTERM: a poll that sees it is no faster than the engine's last words."""
    w = Watch()
    w.submit(A, 1)
    w.see(1, running(start_time=0.5))
    w.see(10, running(flags=COMPLETING))
    w.see(14.9, running(flags=COMPLETING))
    assert w.gone == []
    w.see(15, running(flags=COMPLETING))
    assert w.gone == [(A, 0, False)], "it hangs, or its connection does"


def test_an_engine_that_crashed_says_no_goodbye() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running(start_time=0.5))
    w.see(10, running(flags=COMPLETING, exit_code=1))
    assert w.gone == [(A, 0, True)]


def test_pending_again_after_running_tells_the_router_at_once() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running())
    w.see(2, ours(A, 1, restart_count=1, reason="BeginTime"))
    assert w.gone == [(A, 0, False)]
    assert w.ends == [(0, "preempted")]


def test_a_life_between_two_looks_is_told_by_the_restart_count() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running())
    w.see(60, running(restart_count=2, start_time=50.0))
    assert w.gone == [(A, 0, False), (A, 1, False)]
    assert w.ends == [(0, "preempted"), (1, "preempted")]
    w.submit(B, 2, 60)
    w.see(61, running(restart_count=2, start_time=50.0), ours(B, 2, restart_count=1, reason="BeginTime"))
    assert (B, 0, False) in w.gone


# As nine of nine drained engines were seen on Slurm 24.11.5, where a job that was preempted once is put back after whichever exit comes
# later. These views are written down: the Slurm of these tests is of 22.05, which does so only when asked (`test_on_slurm`).


@pytest.mark.parametrize("back", [JobState.PENDING, JobState.RUNNING])
@pytest.mark.parametrize("seen_to_end", [True, False])
def test_a_drained_job_that_slurm_puts_back_is_not_to_be_there(back: JobState, seen_to_end: bool) -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running(start_time=0.5))
    w.see(10, ours(A, 1, restart_count=1, reason="BeginTime", submit_time=9.0))
    w.see(20, running(restart_count=1, start_time=19.0))
    assert w.tracker.jobs({})[0].returned == "", "it was preempted, and is to come back"
    w.tracker.revoke(A, DrainKind.DRAINING, "its run wants no engine", 30)
    w.see(31, running(restart_count=1, start_time=19.0))
    assert w.tracker.jobs({})[0].returned == "", "it is about to leave"
    if seen_to_end:
        w.see(32, ours(A, 1, JobState.COMPLETED, restart_count=1, start_time=19.0, end_time=31.5))
        assert w.tracker.jobs({}) == []
    again = ours(A, 1, back, restart_count=2, start_time=32.5 if back is JobState.RUNNING else 0.0)
    assert w.tracker.surprised([again]), (
        "nothing is cancelled on the queue alone, so that a whole poll follows"
    )
    w.see(33, again)
    [job] = w.tracker.jobs({})
    assert job.returned == "it was draining (its run wants no engine), and Slurm put it back"
    assert job.waits is (back is JobState.PENDING)
    w.tracker.revoke(A, DrainKind.CANCELLED, job.returned, 33)
    w.see(34, again)
    assert w.tracker.jobs({})[0].returned == "", "it was cancelled: Slurm has been asked, and takes its time"
    assert not w.tracker.surprised([again])
    w.see(35, running(restart_count=3, start_time=34.5))
    assert w.tracker.jobs({})[0].returned, "and once more"


def test_a_job_that_ended_by_itself_is_not_to_come_back_and_one_that_left_on_notice_is() -> None:
    w = Watch()
    for intent, job_id, code in ((A, 1, 0), (B, 2, 75)):
        w.submit(intent, job_id)
        w.see(1, running(intent, job_id, start_time=0.5))
        state = JobState.FAILED if code else JobState.COMPLETED
        w.see(10, ours(intent, job_id, state, exit_code=code, start_time=0.5, end_time=9.0))
    back = [running(intent, n, restart_count=1, start_time=11.0) for intent, n in ((A, 1), (B, 2))]
    w.see(12, *back)
    assert [job.returned for job in w.tracker.jobs({})] == [
        "it had ended by itself, and Slurm put it back",
        "",
    ]


def test_a_restarted_daemon_knows_of_a_job_that_its_predecessor_saw_complete() -> None:
    w = Watch()
    open_intents = [
        rec.OpenIntent(intended(intent), job_id, state, 1, "node1", False, last_allocation=1)
        for intent, job_id, state in ((A, 1, "COMPLETED"), (B, 2, "PREEMPTED"))
    ]
    w.tracker.restore(open_intents, 50)
    w.see(51, *(running(one, n, restart_count=2, start_time=50.5) for one, n in ((A, 1), (B, 2))))
    assert [bool(job.returned) for job in w.tracker.jobs({})] == [True, False]


@pytest.mark.parametrize("state", [JobState.PREEMPTED, JobState.NODE_FAIL, JobState.BOOT_FAIL])
def test_states_that_return_are_not_ends(state: JobState) -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running())
    w.see(5, ours(A, 1, state))
    assert w.gone == [(A, 0, False)]
    w.see(30, ours(A, 1, restart_count=1, reason="BeginTime"))
    w.see(200, ours(A, 1, restart_count=1, reason="BeginTime"))
    assert w.of(rec.JobEnded) == []
    assert w.ends == [(0, "preempted" if state is JobState.PREEMPTED else "node_fail")]


def test_a_lost_node_is_no_crash_even_when_the_job_says_failed() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running())
    down = [node("node0"), node("node1", states=("down",)), node("node2"), node("node3")]
    w.see(2, ours(A, 1, JobState.FAILED, nodes=("node1",), exit_code=137), nodes=down)
    assert w.gone == [(A, 0, False)]
    assert w.ends == [(0, "node_fail")]
    assert w.tracker.health.backoff() == (0.0, "")


def test_an_absent_job_is_ended_only_after_absent_s_and_more_than_one_look() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running())
    w.see(100)
    assert w.of(rec.JobEnded) == []
    assert w.tracker.jobs({})[0].intent_id == A
    w.see(129)
    assert w.of(rec.JobEnded) == []
    w.see(130)
    assert [r.reason for r in w.of(rec.JobEnded)] == ["not in the queue for 30 s"]
    assert w.ends == [(0, "unknown")]
    assert w.gone == [(A, 0, False)]
    assert w.tracker.jobs({}) == []


def test_a_job_that_shows_again_was_never_gone() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running())
    for at in (10, 35, 60):
        w.see(at)
        w.see(at + 1, running())
    assert (w.ends, w.gone, w.of(rec.JobEnded)) == ([], [], [])


def test_one_empty_look_ends_nothing_even_without_a_waiting_time() -> None:
    w = Watch(replace(RULES, absent_s=0.0))
    w.submit(A, 1)
    w.see(1)
    assert w.of(rec.JobEnded) == []
    w.see(2)
    assert len(w.of(rec.JobEnded)) == 1


def test_a_completing_job_whose_exit_code_is_not_known_is_no_crash() -> None:
    unknown = ours(A, 1, JobState.RUNNING, flags=COMPLETING, exit_code=None)
    assert not observed_jobs.crashed(unknown)
    assert observed_jobs.crashed(replace(unknown, exit_code=1))


@pytest.mark.parametrize(
    ("state", "exit_code", "reason", "crashed"),
    [
        (JobState.COMPLETED, 0, "completed", False),
        (JobState.CANCELLED, 143, "cancelled", False),
        (JobState.FAILED, 1, "failed", True),
        (JobState.FAILED, 137, "failed", True),
        (JobState.FAILED, 143, "cancelled", False),  # somebody's signal, to all of it
        (JobState.FAILED, 75, "preempted", False),  # left on the notice and could not put itself back
        (JobState.FAILED, None, "failed", True),  # a release whose exit codes cannot be read
        (JobState.OUT_OF_MEMORY, 0, "failed", True),
        (JobState.TIMEOUT, 0, "timeout", False),
    ],
)
def test_an_end_is_told_at_once_and_closed_later(
    state: JobState, exit_code: int | None, reason: str, crashed: bool
) -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running(start_time=0.5))
    done = ours(A, 1, state, exit_code=exit_code, nodes=("node1",), start_time=0.5, end_time=4.0)
    w.see(5, done)
    assert w.gone == [(A, 0, crashed)]
    assert w.ends == [(0, reason)]
    assert w.of(rec.AllocationEnded)[0].at == 4.0
    assert w.tracker.jobs({}) == []  # it serves no demand any more
    w.see(20, done)
    assert w.of(rec.JobEnded) == []
    w.see(36)
    assert [r.state for r in w.of(rec.JobEnded)] == [state]


def test_a_job_that_lived_between_two_looks_has_its_hold_in_the_ledger() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(10, ours(A, 1, JobState.FAILED, exit_code=1, nodes=("node2",), start_time=2.0, end_time=3.0))
    [start], [end] = w.of(rec.AllocationStarted), w.of(rec.AllocationEnded)
    assert (start.at, start.node, end.at, end.reason) == (2.0, "node2", 3.0, "failed")
    assert w.gone == [(A, 0, True)]
    w.see(11, ours(A, 1, JobState.FAILED, exit_code=1, nodes=("node2",), start_time=2.0, end_time=3.0))
    assert len(w.of(rec.AllocationStarted)) == 1


def test_a_job_cancelled_in_the_queue_never_held_anything() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, ours(A, 1))
    w.see(2, ours(A, 1, JobState.CANCELLED))
    assert w.of(rec.AllocationStarted) == []
    assert w.gone == []


def test_a_given_back_engine_that_ends_is_completed_and_no_failure() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running())
    w.tracker.revoke(A, DrainKind.DRAINING, "no demand", 2)
    w.see(3, ours(A, 1, JobState.COMPLETED, start_time=1.0, end_time=2.5))
    assert w.ends == [(0, "completed")]
    assert w.tracker.health.backoff() == (0.0, "")
    w.see(40)
    assert "no demand" in w.of(rec.JobEnded)[0].reason


def test_an_engine_that_worked_and_leaves_with_its_run_is_no_failure_one_that_never_did_is() -> None:
    for worked in (True, False):
        w = Watch()
        w.submit(A, 1)
        w.see(1, running(start_time=1.0))
        w.tracker.works([A] if worked else [])
        w.see(5, ours(A, 1, JobState.COMPLETED, start_time=1.0, end_time=4.0))
        assert ("died at once" in w.tracker.health.backoff()[1]) == (not worked)


def test_only_changes_are_recorded() -> None:
    w = Watch()
    w.submit(A, 1)
    for at in range(1, 6):
        w.see(at, ours(A, 1, reason="Priority" if at % 2 else "Resources"))
    assert len(w.of(rec.JobObserved)) == 1


def test_a_held_job_is_reported_as_held() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, ours(A, 1, reason="launch_failed_requeued_held", restart_count=1))
    assert w.tracker.jobs({})[0].held == "launch_failed_requeued_held"


@pytest.mark.parametrize("seen_to_run", [True, False], ids=["seen to run", "between two polls"])
def test_a_job_that_slurm_cannot_start_makes_all_wait_and_blames_no_run_and_no_node(
    seen_to_run: bool,
) -> None:
    w = Watch()
    w.submit(A, 1)
    if seen_to_run:
        w.see(1, ours(A, 1, JobState.RUNNING))
    w.see(2, ours(A, 1, reason="launch_failed_requeued_held", restart_count=1, submit_time=2.0))
    [told] = [event for event in w.of(rec.Event) if event.kind == "launch_failed"]
    assert told.run_id == 0
    health = w.tracker.health
    assert health.backoff()[0] > 2.0
    assert health.backoff_of(1) == (0.0, ""), "its run is not at fault"
    assert health.quarantined(2.0) == ()
    assert [(died.run_id, died.exit_code) for died in w.of(rec.EngineDied)] == (
        [(0, None)] if seen_to_run else []
    )
    w.see(3, ours(A, 1, reason="launch_failed_requeued_held", restart_count=1, submit_time=2.0))
    assert len([event for event in w.of(rec.Event) if event.kind == "launch_failed"]) == 1


# ---------------------------------------------------------------- submissions that got lost, restarts


def test_a_lost_submission_is_looked_up_before_it_may_be_repeated() -> None:
    w = Watch()
    w.submit(A, 0)
    w.keep(w.tracker.submit_unknown(A, "no answer", 0))
    w.see(5)
    assert w.tracker.jobs({})[0].waits, (
        "until it is settled it serves demand: nothing is submitted in its place"
    )
    w.see(6, ours(A, 77))
    assert [(r.intent_id, r.job_id) for r in w.of(rec.JobSubmitted)] == [(A, 77)]
    assert w.tracker.jobs({})[0].job_id == 77


def test_a_submission_that_never_arrived_is_given_up_after_absent_s() -> None:
    w = Watch()
    w.submit(A, 0)
    w.keep(w.tracker.submit_unknown(A, "no answer", 0))
    w.see(5)
    w.see(36)
    [ended] = w.of(rec.JobEnded)
    assert ended.state == "LOST"
    late = w.see(40, ours(A, 78))
    assert late.orphaned_jobs == (78,), "it turned up after it was given up: nobody waits for it"


@pytest.mark.parametrize("more", [{}, {"comment": "rewritten by a plugin"}])
def test_after_a_restart_jobs_are_adopted_by_comment_or_name(more: dict[str, str]) -> None:
    w = Watch()
    w.tracker.restore([rec.OpenIntent(intended(A), 0, "", 0, "", False)], 100.0)
    w.see(101, running(job_id=5, **more))
    assert [(r.intent_id, r.job_id) for r in w.of(rec.JobSubmitted)] == [(A, 5)]
    assert [e.kind for e in w.of(rec.Event)] == ["job_adopted"]


def test_after_a_restart_an_open_hold_goes_on_and_is_not_recorded_twice() -> None:
    w = Watch()
    w.tracker.restore([rec.OpenIntent(intended(A), 5, "RUNNING", 1, "node1", True, 90.0, 1)], 100.0)
    w.see(101, running(job_id=5, restart_count=1))
    assert w.of(rec.AllocationStarted) == []
    w.see(102, ours(A, 5, restart_count=2, reason="BeginTime"))
    assert w.ends == [(1, "preempted")]
    w.see(103, running(job_id=5, restart_count=2))
    assert [r.restart_count for r in w.of(rec.AllocationStarted)] == [2]


def test_after_a_restart_a_job_that_waits_again_waits_for_the_node_where_it_ran() -> None:
    """Else a fresh one is put there, and the other waits behind it while a node that it may not have is idle."""
    w = Watch()
    ran = rec.OpenIntent(intended(A), 5, "RUNNING", 0, "node1", True, 90.0, 0)
    never_ran = rec.OpenIntent(intended(B), 6, "PENDING", 0, "", False)
    w.tracker.restore([ran, never_ran], 100.0)
    w.see(101, ours(A, 5, restart_count=1, reason="BeginTime"), ours(B, 6, reason="Resources"))
    assert [job.pinned for job in w.tracker.jobs({})] == ["node1", ""]


def test_after_a_restart_a_job_that_has_not_run_waits_for_the_node_that_was_chosen_for_it() -> None:
    w = Watch()
    w.tracker.restore([rec.OpenIntent(intended(A, pinned="node2"), 5, "PENDING", 0, "", False)], 100.0)
    w.see(101, ours(A, 5, reason="Resources"))
    assert [job.pinned for job in w.tracker.jobs({})] == ["node2"]


def test_after_a_restart_an_engine_that_dies_lived_since_its_hold_began() -> None:
    w = Watch()
    w.tracker.restore(
        [
            rec.OpenIntent(
                intended(A), 5, "RUNNING", 0, "node1", True, allocated_since=20.0, last_allocation=0
            )
        ],
        100.0,
    )
    w.see(101, ours(A, 5, JobState.FAILED, exit_code=1, nodes=("node1",), start_time=20.0, end_time=100.5))
    assert w.tracker.health.backoff() == (0.0, "")
    [died] = [event for event in w.of(rec.Event) if event.kind == "engine_died"]
    assert "after 80 s" in died.reason


def test_after_a_restart_an_engine_that_leaves_may_have_been_asked_to() -> None:
    w = Watch()
    w.tracker.restore(
        [
            rec.OpenIntent(
                intended(A), 5, "RUNNING", 0, "node1", True, allocated_since=90.0, last_allocation=0
            )
        ],
        100.0,
    )
    w.see(101, ours(A, 5, JobState.COMPLETED, nodes=("node1",), start_time=90.0, end_time=100.5))
    assert w.tracker.health.backoff() == (0.0, "")


def test_after_a_restart_a_job_that_moved_on_closes_the_old_hold() -> None:
    w = Watch()
    w.tracker.restore([rec.OpenIntent(intended(A), 5, "RUNNING", 0, "node1", True, 90.0, 0)], 100.0)
    w.see(101, running(job_id=5, restart_count=1))
    assert w.ends == [(0, "preempted")]
    assert w.gone == [(A, 0, False)]


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.COMPLETED, JobState.PREEMPTED])
def test_after_a_restart_a_hold_that_had_ended_is_not_recorded_again(state: JobState) -> None:
    w = Watch()
    w.tracker.restore(
        [rec.OpenIntent(intended(A), 5, str(state), 0, "node1", False, last_allocation=0)], 100.0
    )
    w.see(101, ours(A, 5, state, exit_code=1, nodes=("node1",), start_time=90.0, end_time=95.0))
    assert (w.of(rec.AllocationStarted), w.of(rec.AllocationEnded)) == ([], [])


def test_jobs_with_our_uid_and_no_open_intent_are_strangers_others_are_left_alone() -> None:
    w = Watch()
    unknown = ours(B, 9)
    foreign = ours(B, 10, comment=comment_of("00000000", B))
    nameless = ours(B, 11, comment="")
    forged = ours(B, 12, user="mallory")
    over = ours(B, 13, JobState.CANCELLED)
    assert w.see(1, unknown, foreign, nameless, forged, over).orphaned_jobs == (9,)


def test_an_id_that_was_given_out_again_is_not_our_job() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running())
    w.see(2, replace(running(), name="theirs", comment="", user="alice"))
    assert w.tracker.intents[A].stage is Stage.MISSING


# ---------------------------------------------------------------- health


def test_a_quick_look_is_expected_after_submissions_and_preemptions_but_not_while_all_is_quiet() -> None:
    w = Watch()
    assert not w.tracker.expecting(0)
    w.submit(A, 1)
    assert w.tracker.expecting(1)
    w.see(2, running())
    assert not w.tracker.expecting(3)
    w.see(3, ours(A, 1, restart_count=1, reason="BeginTime"))
    assert w.tracker.expecting(4)
    assert not w.tracker.expecting(4000), "a job that waits for hours is no reason to look often"
