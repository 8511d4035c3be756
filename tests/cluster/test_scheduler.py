"""The pure scheduler: who starts where, who is preempted, what a lost node, a cancellation or a deadline does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.local.scheduler import (
    HOLDING,
    Action,
    Ended,
    Event,
    Exited,
    JobCancellation,
    JobPhase,
    JobRequeue,
    JobSignal,
    JobSubmission,
    NodeDown,
    NodeUp,
    Requeued,
    Scheduler,
    SchedulerTick,
    Signal,
    Start,
    Submitted,
)
from scavenger.cluster.model import JobFlag, JobSpec, JobState, PreemptMode
from scavenger.errors import ClusterError

NODES = ("node0", "node1")


def layout(
    *, grace_s: float = 0.0, mode: PreemptMode = PreemptMode.REQUEUE, limit_s: float = 0.0
) -> ClusterLayout:
    return ClusterLayout(
        nodes=NODES,
        gpus=4,
        cpus=8,
        requeue_delay_s=5,
        kill_wait_s=2,
        partitions=(
            PartitionLayout(name="normal", nodes=NODES, priority_tier=10, max_time_s=limit_s),
            PartitionLayout(
                name="scavenge", nodes=NODES, priority_tier=1, preempt_mode=mode, grace_s=grace_s
            ),
        ),
    )


def spec(partition: str = "scavenge", gpus: int = 4, node: str = "", **more: object) -> JobSpec:
    fixed = (node,) if node else ()
    return JobSpec(
        name="j",
        comment="c",
        partition=partition,
        script="#!/bin/sh\n",
        gpus=gpus,
        nodelist=fixed,
        **more,  # type: ignore[arg-type]
    )  # type: ignore[arg-type]


@dataclass
class Driver:
    """Feeds events, keeps a log of all actions, and plays processes that end when they are told to."""

    scheduler: Scheduler
    now: float = 100.0
    log: list[Action] = field(default_factory=list)

    def do(self, event: Event) -> tuple[Action, ...]:
        actions = self.scheduler.step(event, self.now)
        self.log += actions
        return actions

    def submit(self, job: JobSpec) -> int:
        return next(
            action.job_id for action in self.do(JobSubmission(job, "u")) if isinstance(action, Submitted)
        )

    def exit(self, job_id: int, code: int = 0) -> tuple[Action, ...]:
        return self.do(Exited(job_id, self.scheduler.jobs[job_id].restart_count, code))

    def wait(self, seconds: float) -> tuple[Action, ...]:
        self.now += seconds
        return self.do(SchedulerTick())

    def phase(self, job_id: int) -> JobPhase:
        return self.scheduler.jobs[job_id].phase


def driver(**options: object) -> Driver:
    return Driver(Scheduler(layout(**options)))  # type: ignore[arg-type]


def test_jobs_start_first_come_first_served_on_disjoint_gpus() -> None:
    d = driver()
    jobs = [d.submit(spec(gpus=2)) for _ in range(5)]
    starts = [action for action in d.log if isinstance(action, Start)]
    assert [(s.job_id, s.gpus) for s in starts] == [
        (jobs[0], (("node0", (0, 1)),)),
        (jobs[1], (("node0", (2, 3)),)),
        (jobs[2], (("node1", (0, 1)),)),
        (jobs[3], (("node1", (2, 3)),)),
    ]
    assert d.phase(jobs[4]) is JobPhase.PENDING
    assert Start(jobs[4], 0, spec(gpus=2), (("node0", (2, 3)),)) in d.exit(jobs[1])


def test_the_first_waiting_job_of_a_partition_holds_back_the_rest_of_it() -> None:
    d = driver()
    d.submit(spec("normal", 4, "node0"))
    d.submit(spec("normal", 2, "node1"))
    big, small = d.submit(spec("normal", 4)), d.submit(spec("normal", 1))
    assert d.scheduler.jobs[big].reason == "Resources"
    assert (d.phase(small), d.scheduler.jobs[small].reason) == (JobPhase.PENDING, "Priority")


def test_nice_lets_others_of_the_same_partition_go_first() -> None:
    d = driver()
    first = d.submit(spec("normal", 4, "node0"))
    nice, later = d.submit(spec("normal", 4, "node0", nice=100)), d.submit(spec("normal", 4, "node0"))
    d.exit(first)
    assert (d.phase(nice), d.phase(later)) == (JobPhase.PENDING, JobPhase.RUNNING)


def test_without_grace_a_preempted_job_is_ended_at_once_killed_after_killwait_and_comes_back() -> None:
    d = driver()
    victim = d.submit(spec(node="node0"))
    taker = d.submit(spec("normal", 1, "node0"))
    assert d.log[-1] == Signal(victim, 0, JobSignal.TERM, f"preempted by job {taker}")
    assert d.wait(2)[0] == Signal(victim, 0, JobSignal.KILL, f"KillWait is over (preempted by job {taker})")
    assert d.exit(victim, 137) == (
        Requeued(victim, 1, d.now + 5, f"preempted by job {taker}"),
        Start(taker, 0, spec("normal", 1, "node0"), (("node0", (0,)),)),
    )
    d.exit(taker)
    assert d.scheduler.next_wakeup() == d.now + 5
    assert d.wait(4.9) == ()
    assert d.wait(0.1) == (Start(victim, 1, spec(node="node0"), (("node0", (0, 1, 2, 3)),)),)


def test_with_grace_a_preempted_job_gets_notice_first_and_is_ended_when_it_stays() -> None:
    d = driver(grace_s=10)
    victim, taker = d.submit(spec(node="node0")), d.submit(spec("normal", 1, "node0"))
    why = f"preempted by job {taker}"
    assert d.log[-1] == Signal(victim, 0, JobSignal.STEPS, why)
    assert d.scheduler.view(d.now).jobs[0].state is JobState.RUNNING
    assert d.scheduler.next_wakeup() == d.now + 10
    assert d.wait(10) == (Signal(victim, 0, JobSignal.TERM, why),)
    assert d.scheduler.view(d.now).jobs[0].flags == {JobFlag.COMPLETING}
    assert Requeued(victim, 1, d.now + 5, why) in d.exit(victim, 143)


def test_a_job_that_just_exits_in_the_grace_has_ended_and_one_that_requeues_itself_comes_back() -> None:
    for requeues in (False, True):
        d = driver(grace_s=10)
        victim = d.submit(spec(node="node0"))
        d.submit(spec("normal", 1, "node0"))
        if requeues:
            d.do(JobRequeue(victim))
        d.exit(victim)
        state = d.scheduler.jobs[victim].state
        assert state is (JobState.PENDING if requeues else JobState.COMPLETED)


def test_preemption_takes_as_few_gpus_as_it_can_from_the_youngest() -> None:
    d = driver()
    d.submit(spec(gpus=4, node="node0"))
    old = d.submit(spec(gpus=2, node="node1"))
    d.now += 1
    young = d.submit(spec(gpus=2, node="node1"))
    d.submit(spec("normal", 2))
    assert (d.phase(old), d.phase(young)) == (JobPhase.RUNNING, JobPhase.STOPPING)
    assert len([a for a in d.log if isinstance(a, Signal)]) == 1


def test_a_second_preemptor_does_not_count_on_gpus_promised_to_the_first() -> None:
    d = driver(grace_s=10)
    a, b = d.submit(spec(node="node0")), d.submit(spec(node="node1"))
    first = d.submit(spec("normal", 4))
    assert (d.phase(a), d.phase(b)) == (JobPhase.GRACE, JobPhase.RUNNING)
    d.do(SchedulerTick())
    d.do(SchedulerTick())
    assert d.phase(b) is JobPhase.RUNNING  # waiting on and on costs nobody else
    d.exit(a)
    assert d.phase(first) is JobPhase.RUNNING
    d.submit(spec("normal", 4))
    assert d.phase(b) is JobPhase.GRACE


def test_gpus_that_a_waiting_job_will_take_are_not_given_to_preemptible_ones() -> None:
    d = driver(grace_s=10)
    d.submit(spec("normal", 4, "node1"))
    d.submit(spec(gpus=2, node="node0"))
    d.submit(spec("normal", 4, "node0"))  # preempts the 2 and waits for all 4
    late = d.submit(spec(gpus=1, node="node0"))
    assert d.phase(late) is JobPhase.PENDING


def test_nothing_is_preempted_for_a_job_that_could_not_start_anyway() -> None:
    d = driver()
    d.submit(spec("normal", 2, "node0"))
    victim = d.submit(spec(gpus=2, node="node0"))
    d.submit(spec("normal", 4, "node0"))
    assert d.phase(victim) is JobPhase.RUNNING


def test_peers_of_the_same_tier_are_never_preempted() -> None:
    d = driver()
    held = d.submit(spec("normal", 4, "node0"))
    d.submit(spec("normal", 4, "node0"))
    assert d.phase(held) is JobPhase.RUNNING


def test_mode_cancel_and_no_requeue_end_as_preempted() -> None:
    for mode, requeue in ((PreemptMode.CANCEL, True), (PreemptMode.REQUEUE, False)):
        d = driver(mode=mode)
        victim = d.submit(spec(node="node0", requeue=requeue))
        taker = d.submit(spec("normal", 1, "node0"))
        ended = d.exit(victim, 143)[0]
        assert ended == Ended(victim, JobState.PREEMPTED, 143, f"preempted by job {taker}")


def test_a_lost_node_kills_without_notice_and_gives_nothing_until_it_is_back() -> None:
    d = driver(grace_s=10)
    job = d.submit(spec(node="node0"))
    assert d.do(NodeDown("node0")) == (Signal(job, 0, JobSignal.KILL, "node node0 failed"),)
    d.exit(job, 137)
    d.wait(6)
    assert d.phase(job) is JobPhase.PENDING
    assert not d.scheduler.view(d.now).nodes[0].usable
    assert [type(action) for action in d.do(NodeUp("node0"))] == [Start]


def test_a_node_lost_while_a_job_is_ending_does_not_undo_what_it_ends_as() -> None:
    d = driver()
    job = d.submit(spec(node="node0"))
    d.do(JobCancellation(job))
    assert d.do(NodeDown("node0")) == (Signal(job, 0, JobSignal.KILL, "node node0 failed"),)
    d.exit(job, 137)
    assert d.scheduler.jobs[job].state is JobState.CANCELLED


def test_cancelling_beats_a_requeue_that_is_under_way_and_no_requeue_beats_a_cancellation() -> None:
    d = driver()
    job = d.submit(spec())
    d.do(JobRequeue(job))
    d.do(JobCancellation(job))
    with pytest.raises(ClusterError, match="cannot be requeued"):
        d.do(JobRequeue(job))
    d.exit(job, 143)
    assert d.scheduler.jobs[job].state is JobState.CANCELLED


def test_a_time_limit_ends_a_job_as_timeout() -> None:
    d = driver(limit_s=60)
    job = d.submit(spec("normal"))
    assert d.wait(60) == (Signal(job, 0, JobSignal.TERM, "TimeLimit"),)
    d.exit(job, 143)
    assert d.scheduler.jobs[job].state is JobState.TIMEOUT


def test_the_exit_of_an_earlier_life_is_refused_and_changes_nothing() -> None:
    d = driver()
    job = d.submit(spec())
    d.do(JobRequeue(job))
    d.exit(job)
    d.wait(5)
    with pytest.raises(ClusterError, match="does not run"):
        d.do(Exited(job, 0, 1))
    assert d.phase(job) is JobPhase.RUNNING


def test_ended_jobs_are_listed_for_a_while() -> None:
    d = driver()
    job = d.submit(spec())
    d.exit(job, 1)
    assert [(j.job_id, j.state, j.exit_code) for j in d.scheduler.view(d.now).jobs] == [
        (job, JobState.FAILED, 1)
    ]
    d.wait(301)
    assert d.scheduler.view(d.now).jobs == ()


def test_a_job_over_two_nodes_starts_on_both_or_not_at_all() -> None:
    d = driver()
    d.submit(spec("normal", 1, "node0"))
    wide = d.submit(spec("normal", 4, nodes=2))
    assert d.phase(wide) is JobPhase.PENDING
    d.exit(1)
    assert d.phase(wide) is JobPhase.RUNNING
    view = d.scheduler.view(d.now).jobs[-1]
    assert (view.gpus, view.gpus_by_node) == (8, (("node0", 4), ("node1", 4)))


def holds_together(d: Driver) -> None:
    """What must be true after every event: no GPU has two owners, and nobody strong waits for what it may take."""
    for name in NODES:
        held = [i for job in d.scheduler.jobs.values() for i in job.gpus.get(name, ())]
        assert len(held) == len(set(held)) <= 4
        cpus = sum(job.cpus_per_node for job in d.scheduler.jobs.values() if name in job.gpus)
        assert cpus <= 8
    for job in d.scheduler.jobs.values():
        assert (job.phase in HOLDING) == bool(job.gpus)
    waiting = [
        j
        for j in d.scheduler.jobs.values()
        if j.phase is JobPhase.PENDING and j.spec.partition == "normal" and j.eligible_time <= d.now
    ]
    if waiting and len(d.scheduler.down) < len(NODES):
        weak = [
            j
            for j in d.scheduler.jobs.values()
            if j.phase is JobPhase.RUNNING and j.spec.partition == "scavenge"
        ]
        first = min(waiting, key=lambda j: (-j.priority, j.job_id))
        allowed = [
            n
            for n in NODES
            if n not in d.scheduler.down and (not first.spec.nodelist or n in first.spec.nodelist)
        ]
        for name in allowed:
            strong = sum(len(j.gpus.get(name, ())) for j in d.scheduler.jobs.values() if j not in weak)
            assert (
                4 - strong < first.spec.gpus
                or all(name not in j.gpus for j in weak)
                or any(j.phase in (JobPhase.GRACE, JobPhase.STOPPING) for j in d.scheduler.jobs.values())
            )


MOVES = st.lists(
    st.tuples(st.integers(0, 7), st.integers(1, 4), st.integers(0, 9), st.floats(0, 6)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(MOVES, st.sampled_from([0.0, 3.0]))
def test_no_schedule_of_events_breaks_the_cluster(
    moves: list[tuple[int, int, int, float]], grace_s: float
) -> None:
    d = driver(grace_s=grace_s)
    for kind, gpus, pick, seconds in moves:
        d.now += seconds
        live = sorted(job.job_id for job in d.scheduler.jobs.values() if job.phase in HOLDING)
        node = NODES[pick % 2]
        if kind in (0, 1):
            d.submit(spec("normal" if kind else "scavenge", gpus, node if pick < 4 else ""))
        elif kind == 2 and live:
            d.exit(live[pick % len(live)], pick % 3)
        elif kind == 3 and live:
            d.do(JobCancellation(live[pick % len(live)]))
        elif kind == 4 and live and d.phase(live[pick % len(live)]) is not JobPhase.STOPPING:
            d.do(JobRequeue(live[pick % len(live)]))
        elif kind in (5, 6):
            d.do(NodeDown(node) if kind == 5 else NodeUp(node))
        else:
            d.do(SchedulerTick())
        holds_together(d)
    for name in NODES:
        d.do(NodeUp(name))
    for _ in range(1000):  # everyone leaves when told to: the queue drains and every job ends
        live = sorted(job.job_id for job in d.scheduler.jobs.values() if job.phase in HOLDING)
        if not live and not any(job.phase is JobPhase.PENDING for job in d.scheduler.jobs.values()):
            return
        if live:
            d.exit(live[0])
        d.wait(1)
    raise AssertionError("the queue did not drain")


@settings(max_examples=30, deadline=None)
@given(MOVES)
def test_equal_events_give_equal_actions(moves: list[tuple[int, int, int, float]]) -> None:
    one, two = driver(grace_s=3), driver(grace_s=3)
    for kind, gpus, pick, seconds in moves:
        for d in (one, two):
            d.now += seconds
            d.do(
                JobSubmission(
                    spec("normal" if kind % 2 else "scavenge", gpus, NODES[pick % 2] if pick < 4 else ""), "u"
                )
            )
    assert one.log == two.log
