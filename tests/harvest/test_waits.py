"""Who waited while we held GPUs, and the GPUs of training jobs: from polls to rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scavenger.cluster.model import ClusterView, Job, JobState
from scavenger.harvest.decide.free_capacity import waiting_jobs
from scavenger.harvest.track import waits
from scavenger.harvest.track.training_jobs import TrainingGpus
from scavenger.harvest.track.waits import OtherUsersWaits
from scavenger.ledger import records as rec
from tests.harvest.views import USER, job, node, view

T0 = 1000.0
OURS = {"node1": 3}


def queue(*jobs: Job) -> ClusterView:
    return view(T0, jobs, [node("node1", 3), node("node2")])


def seen(one: OtherUsersWaits, at: float, *jobs: Job, held: dict[str, int] = OURS) -> tuple[rec.Record, ...]:
    found = queue(*jobs)
    return one.observe(found, waiting_jobs(found, frozenset(), at), held, at)


def waiting(job_id: int = 7, **more: Any) -> Job:
    return job(job_id, submit_time=T0 - 30, eligible_time=T0 - 20, **more)


def test_a_wait_begins_ends_and_says_what_we_held() -> None:
    one = OtherUsersWaits(USER)
    assert seen(one, T0, waiting(), held={}) == (), "we held nothing there"
    assert seen(one, T0, waiting()) == (
        rec.OtherUserWaits(7, "alice", "normal", 1, T0 - 30, T0 - 20, T0, harvested_gpus=3),
    )
    assert seen(one, T0 + 10, waiting(), held={"node1": 1, "node0": 4}) == (), (
        "node0 is none of its partition's"
    )
    started = replace(waiting(), state=JobState.RUNNING, start_time=T0 + 14, nodes=("node1",))
    assert seen(one, T0 + 20, started) == (
        rec.OtherUserWaited(7, T0 - 30, "started", T0 + 14, 3, 3 * 10 + 1 * 4.0, T0 + 14),
    )
    assert seen(one, T0 + 30, started) == ()


@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        ((), "left"),
        ((replace(waiting(), state=JobState.CANCELLED, start_time=T0 + 5, end_time=T0 + 5),), "cancelled"),
    ],
)
def test_what_becomes_of_a_job_that_did_not_start(then: tuple[Job, ...], outcome: str) -> None:
    one = OtherUsersWaits(USER)
    seen(one, T0, waiting())
    assert seen(one, T0 + 10, *then) == (rec.OtherUserWaited(7, T0 - 30, outcome, None, 3, 30.0, T0 + 10),)


def test_a_job_that_began_and_ended_between_two_polls_started() -> None:
    one = OtherUsersWaits(USER)
    seen(one, T0, waiting())
    over = replace(waiting(), state=JobState.CANCELLED, start_time=T0 + 5, end_time=T0 + 7)
    assert [
        (r.outcome, r.started_at) for r in seen(one, T0 + 10, over) if isinstance(r, rec.OtherUserWaited)
    ] == [("started", T0 + 5)]


def test_a_requeued_job_waits_anew() -> None:
    one = OtherUsersWaits(USER)
    seen(one, T0, waiting())
    again = replace(waiting(), submit_time=T0 + 8, eligible_time=T0 + 8)
    ended, began = seen(one, T0 + 10, again)
    assert isinstance(ended, rec.OtherUserWaited)
    assert ended.outcome == "requeued"
    assert began == rec.OtherUserWaits(7, "alice", "normal", 1, T0 + 8, T0 + 8, T0 + 10, harvested_gpus=3)


def test_an_array_is_one_wait_that_goes_on_while_one_of_its_tasks_waits() -> None:
    one = OtherUsersWaits(USER)
    first, second = waiting(), waiting()
    assert len(seen(one, T0, first, second)) == 1, "an array is one wait"
    started = replace(first, state=JobState.RUNNING, start_time=T0 + 1)
    assert seen(one, T0 + 10, started, second) == ()


@pytest.mark.parametrize(
    "why", ["JobHeldUser", "Dependency", "JobArrayTaskLimit", "QOSMaxJobsPerUserLimit", "BeginTime"]
)
def test_a_wait_ends_while_the_job_waits_for_no_gpu(why: str) -> None:
    one = OtherUsersWaits(USER)
    seen(one, T0, waiting())
    later = T0 + 90000 if why == "BeginTime" else T0 - 20
    held = replace(waiting(), reason=why, eligible_time=later)
    assert seen(one, T0 + 10, held) == (rec.OtherUserWaited(7, T0 - 30, "held", None, 3, 30.0, T0 + 10),)
    assert seen(one, T0 + 20, held) == (), "a day of it is nobody's wait"
    assert seen(one, T0 + 86400, held) == ()
    assert seen(one, T0 + 86410, waiting()) == (
        rec.OtherUserWaits(7, "alice", "normal", 1, T0 - 30, T0 + 86400, T0 + 86410, harvested_gpus=3),
    ), "it waits again since the last poll that saw it held, whatever Slurm's eligible time says"


def test_a_wait_ends_as_held_also_once_we_hold_nothing() -> None:
    one = OtherUsersWaits(USER)
    seen(one, T0, waiting())
    assert seen(one, T0 + 10, waiting(), held={}) == (), "it waits on"
    [ended] = seen(one, T0 + 20, replace(waiting(), reason="JobHeldAdmin"), held={})
    assert isinstance(ended, rec.OtherUserWaited)
    assert (ended.outcome, ended.harvested_gpu_s) == ("held", 30.0)


def test_an_array_s_wait_ends_with_the_task_that_starts_though_its_limit_stops_the_rest() -> None:
    one = OtherUsersWaits(USER)
    rest = replace(waiting(), reason="JobArrayTaskLimit")
    first = replace(waiting(), state=JobState.RUNNING, start_time=T0 + 4, nodes=("node1",))
    seen(one, T0, waiting())
    [ended] = seen(one, T0 + 10, first, rest)
    assert isinstance(ended, rec.OtherUserWaited)
    assert (ended.outcome, ended.started_at) == ("started", T0 + 4)
    [began] = seen(one, T0 + 20, first, waiting(), rest)
    assert isinstance(began, rec.OtherUserWaits)
    assert began.eligible_at == T0 + 10, "the limit stopped it until then"
    [ended] = seen(one, T0 + 30, first, rest)
    assert isinstance(ended, rec.OtherUserWaited)
    assert ended.outcome == "held", "the first task began before this wait"


def test_held_jobs_leave_their_places_to_jobs_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MOST", 2)
    one = OtherUsersWaits(USER)
    assert len(seen(one, T0, waiting(1), waiting(2), waiting(3))) == 2
    held = [replace(waiting(n), reason="JobHeldUser") for n in (1, 2)]
    records = seen(one, T0 + 10, *held, waiting(3))
    assert [r.job_id for r in records if isinstance(r, rec.OtherUserWaits)] == [3]


def test_our_own_user_s_jobs_and_other_harvesters_engines_are_no_other_users_waits() -> None:
    one = OtherUsersWaits(USER)
    assert seen(one, T0, waiting(1, user=USER), waiting(2, user="bob", name="scv-0123456789abcdef")) == ()
    [began] = seen(one, T0 + 10, waiting(3, user="bob", name="scv-of-my-own"))
    assert isinstance(began, rec.OtherUserWaits)
    assert began.job_id == 3


def test_what_nobody_looked_at_and_what_was_before_a_restart_is_not_counted() -> None:
    one = OtherUsersWaits(USER)
    (began,) = seen(one, T0, waiting())
    [ended] = seen(one, T0 + 5000)
    assert isinstance(ended, rec.OtherUserWaited)
    assert ended.harvested_gpu_s == 3 * waits.MOST_UNSEEN_S
    assert isinstance(began, rec.OtherUserWaits)
    successor = OtherUsersWaits(USER)
    successor.restore([began], T0 + 100)
    assert seen(successor, T0 + 110, waiting()) == (), "its row is there"
    assert seen(successor, T0 + 120) == (rec.OtherUserWaited(7, T0 - 30, "left", None, 3, 30.0, T0 + 120),)


def test_waits_are_bounded_and_the_first_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MOST", 2)
    one = OtherUsersWaits(USER)
    jobs = [replace(waiting(n), eligible_time=T0 - n) for n in range(1, 6)]
    assert [r.job_id for r in seen(one, T0, *jobs) if isinstance(r, rec.OtherUserWaits)] == [5, 4]
    ended, began = seen(one, T0 + 10, *jobs[:4])
    assert isinstance(ended, rec.OtherUserWaited)
    assert isinstance(began, rec.OtherUserWaits)
    assert (ended.job_id, began.job_id) == (5, 3)


def test_a_wait_for_the_harvest_partition_s_nodes_is_recorded_also_without_us() -> None:
    def poll(one: OtherUsersWaits, at: float, *jobs: Job, held: dict[str, int]) -> tuple[rec.Record, ...]:
        found = queue(*jobs)
        nodes = frozenset({"node2"})
        return one.observe(found, waiting_jobs(found, frozenset(), at), held, at, nodes)

    one = OtherUsersWaits(USER)
    assert poll(one, T0, waiting(8, partition="elsewhere"), held={}) == (), "a partition without such a node"
    [began] = poll(one, T0, waiting(), held={})
    assert began == rec.OtherUserWaits(7, "alice", "normal", 1, T0 - 30, T0 - 20, T0)
    started = replace(waiting(), state=JobState.RUNNING, start_time=T0 + 4, nodes=("node1",))
    assert poll(one, T0 + 10, started, held={}) == (
        rec.OtherUserWaited(7, T0 - 30, "started", T0 + 4, 0, 0.0, T0 + 4),
    )
    poll(one, T0 + 20, waiting(9), held={})
    poll(one, T0 + 30, waiting(9), held=OURS)
    [ended] = poll(one, T0 + 40, held={})
    assert isinstance(ended, rec.OtherUserWaited)
    assert (ended.harvested_gpus, ended.harvested_gpu_s) == (3, 30.0), "we came while it waited"


def test_waits_without_us_leave_room_to_those_beside_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MOST_WITHOUT", 2)
    one = OtherUsersWaits(USER)
    found, nodes = queue(*(waiting(n) for n in range(1, 6))), frozenset({"node2"})
    first = one.observe(found, waiting_jobs(found, frozenset(), T0), {}, T0, nodes)
    assert [r.job_id for r in first if isinstance(r, rec.OtherUserWaits)] == [1, 2]
    then = one.observe(found, waiting_jobs(found, frozenset(), T0), OURS, T0 + 10, nodes)
    assert [r.job_id for r in then if isinstance(r, rec.OtherUserWaits)] == [3, 4, 5]


# ---------------------------------------------------------------- training jobs


ADA = (1, 50, "ada")  # run, job, the Unix user of the run's owner


def training(state: JobState = JobState.RUNNING, **more: Any) -> Job:
    return Job(50, "ada", "reserved", state, **{"gpus": 8, "n_nodes": 2, "start_time": T0 - 5, **more})


def test_a_training_job_s_gpus_are_recorded_from_start_to_end() -> None:
    one = TrainingGpus()
    assert one.observe([(1, 0, "ada")], [training()], T0) == (), "a run of no Slurm job"
    assert one.observe([ADA], [training(JobState.PENDING, start_time=0.0)], T0) == ()
    assert one.observe([ADA], [training()], T0) == (rec.TrainingJobStarted(1, 50, "ada", 2, 8, T0 - 5),)
    assert one.observe([], [training()], T0 + 10) == (), "its run has ended, and it holds its GPUs"
    ended = training(JobState.COMPLETED, end_time=T0 + 12)
    assert one.observe([], [ended], T0 + 20) == (rec.TrainingJobEnded(1, 50, T0 + 12),)
    assert one.observe([], [ended], T0 + 30) == ()


def test_a_training_job_s_account_is_recorded_with_its_user() -> None:
    (began,) = TrainingGpus().observe([ADA], [training(account="physics")], T0)
    assert began == rec.TrainingJobStarted(1, 50, "ada", 2, 8, T0 - 5, "physics")


def test_a_requeued_training_job_has_two_spans_and_a_vanished_one_ends() -> None:
    one = TrainingGpus()
    one.observe([ADA], [training()], T0)
    back = training(start_time=T0 + 30, submit_time=T0 + 20)
    assert one.observe([ADA], [back], T0 + 40) == (
        rec.TrainingJobEnded(1, 50, T0 + 20),
        rec.TrainingJobStarted(1, 50, "ada", 2, 8, T0 + 30),
    )
    assert one.observe([ADA], [], T0 + 60) == (rec.TrainingJobEnded(1, 50, T0 + 60),)


def test_a_restarted_daemon_goes_on_with_the_same_span() -> None:
    one = TrainingGpus()
    (began,) = one.observe([ADA], [training()], T0)
    assert isinstance(began, rec.TrainingJobStarted)
    successor = TrainingGpus()
    successor.restore([began])
    assert successor.observe([ADA], [training()], T0 + 10) == ()
    waits_again = training(JobState.PENDING, submit_time=T0 + 15, start_time=0.0)
    assert successor.observe([ADA], [waits_again], T0 + 20) == (rec.TrainingJobEnded(1, 50, T0 + 15),)


def test_a_job_of_another_user_s_that_a_trainer_names_is_not_recorded() -> None:
    one = TrainingGpus()
    bobs = replace(training(), user="bob")
    assert one.observe([ADA], [bobs], T0) == (), "neither his name nor his GPUs"
    assert one.observe([(1, 50, "")], [training()], T0) == (), "of an owner whom nobody knows"
    assert one.observe([(1, 50, "")], [replace(training(), user="")], T0) == ()
    assert one.observe([ADA, (2, 50, "bob")], [bobs], T0) == (
        rec.TrainingJobStarted(2, 50, "bob", 2, 8, T0 - 5),
    )


def test_runs_of_one_job_have_rows_from_one_time_on() -> None:
    one = TrainingGpus()
    soon = training(start_time=T0 + 1)  # the controller's clock is ahead
    [first] = one.observe([ADA], [soon], T0)
    [second] = one.observe([ADA, (2, 50, "ada")], [soon], T0 + 60)
    assert isinstance(first, rec.TrainingJobStarted)
    assert isinstance(second, rec.TrainingJobStarted)
    assert (first.run_id, first.at, second.run_id, second.at) == (1, T0, 2, T0)
