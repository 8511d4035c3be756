"""On a real Slurm, engines are lost in three ways while one run trains; nothing of the run changes and nobody waits for us.

The arms follow one another in one run on one cluster: GraceTime 10, GraceTime 0, and no notice at all.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import JobState
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.harvest import limits as harvest_limits
from scavenger.ledger import queries
from tests import slurm_faults
from tests.system import play

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]

STEPS = 80  # more than any machine takes until the engines are lost
PACE = 3.0  # tokens a second and sample
FLUSH_S = 0.1
PER_ARM = 7
ENGINES = 6


@dataclass
class Arm:
    name: str
    grace_s: float
    lost: set[int] = field(default_factory=set)
    others: list[int] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    killed_at: dict[int, float] = field(default_factory=dict)  # worker -> when it was dead for certain


@pytest.mark.timeout(900)
def test_engines_are_lost_in_three_ways_and_training_does_not_notice(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    # The predicting policy gives engines back that no step needs: some that were chosen here would not be lost.
    options = SiteOptions(
        "slurm",
        tmp_path,
        # As Slurm has it without a word of the admin: on a busy machine an engine may take 2 s to say goodbye.
        replace(demo_layout(grace_s=10.0), kill_wait_s=30.0),
        poll_interval_s=0.5,
        max_engines=ENGINES,
        harvest={"max_pending": 6},
        router={"policy": "standard"},
    )
    with DemoSite(options) as site:
        # The reserved engine wakes late, so that lost engines are back before the steps are over.
        run = play.write_run(
            site,
            small_model,
            run={"steps": STEPS},
            engine={"max_batch": 3, "pace": PACE},
            checkpoint={"every": 4},
            reserved={"wake_after_s": 30.0},
        )
        training = play.submit(site, run)
        arms = [Arm("GraceTime=10", 10.0), Arm("GraceTime=0", 0.0), Arm("no notice", 0.0)]
        for arm in arms:
            site.sandbox.run("scontrol", "update", "PartitionName=scavenge", f"GraceTime={arm.grace_s:.0f}")
            _lose_engines(site, arm)
        after = play.steps_done(site) + 2  # the one in which the last ones were lost, and one more
        play.wait_for("training to go on", lambda: play.steps_done(site) >= after)
        done = play.cut_short(site, training)
        harvest_limits.drain(site.state_dir, "the test", at_once=False)
        play.wait_for("our jobs to leave the queue", lambda: not play.jobs_left(site))
        found = play.result(site).until(done)
        assert found == play.as_long(undisturbed, found, small_model, tmp_path)
        _check_ledger(site, arms)
        for arm in arms[:2]:
            assert max(arm.waited_s) <= arm.grace_s + 5, f"{arm.name}: others waited {arm.waited_s}"


def _lose_engines(site: DemoSite, arm: Arm) -> None:
    """Take engines that hold samples, node by node, until the arm has its share."""
    deadline = (
        time.monotonic() + 240
    )  # six engines that start at once on two busy cores import for half a minute, twice in an arm
    while len(arm.lost) < PER_ARM:
        assert time.monotonic() < deadline, (
            f"{arm.name}: only {len(arm.lost)} engines were at work to be lost\n{play.logs(site)}"
        )
        assert play.steps_done(site) < STEPS, f"{arm.name}: the run ended before its engines were lost"
        by_node: dict[str, list[tuple[int, int]]] = {}
        for worker, job, node in play.busy(site):
            if worker not in arm.lost:
                by_node.setdefault(node, []).append((worker, job))
        if sum(map(len, by_node.values())) < min(ENGINES - 2, PER_ARM - len(arm.lost)):
            time.sleep(
                0.1
            )  # until enough engines are back at work: losing them one by one takes a requeue each
            continue
        for node, engines in by_node.items():
            if arm.name == "no notice":
                for worker, job in engines:
                    slurm_faults.kill_steps(site.sandbox, job)
                    arm.killed_at[worker] = time.time()
                slurm_faults.lose_node(site.sandbox, node)
                slurm_faults.resume_node(site.sandbox, node)
            else:
                arm.others.append(site.submit_other(0.5, 4, node))
            arm.lost |= {worker for worker, _ in engines}
        if by_node:
            _watch_others(site, arm)


def _watch_others(site: DemoSite, arm: Arm) -> None:
    """Wait until the others' jobs have run, and note how long they waited for their GPUs (Slurm's own times, whole seconds)."""

    def ended() -> bool:
        jobs = {j.job_id: j for j in site.cluster.view().jobs}
        done = [jobs[i] for i in arm.others if i in jobs and jobs[i].state is JobState.COMPLETED]
        arm.waited_s = [j.start_time - j.submit_time for j in done]
        return len(done) == len(arm.others)

    play.wait_for(f"{arm.name}: the others' jobs", ended, 60)


def _check_ledger(site: DemoSite, arms: list[Arm]) -> None:
    """At least 20 engines lost, 5 in each arm; nothing generated again with notice, at most one flush interval a sample without. A host
    that stands still records a chunk late: what an engine made meanwhile is lost besides."""
    lost_workers = (
        "SELECT worker_id, notice, samples, salvaged, regenerated, reason FROM workers WHERE left_at > 0"
    )
    rows = {row[0]: row for row in play.ask(site, lost_workers)}
    recorded = dict(play.ask(site, "SELECT worker_id, max(at) FROM chunks GROUP BY worker_id"))
    for arm in arms:
        lost = [rows[worker] for worker in arm.lost]
        assert len(lost) >= 5, arm.name
        for worker, notice, samples, _salvaged, regenerated, reason in lost:
            if arm.name == "no notice":
                assert not notice, f"worker {worker}: {reason}"
                since_s = arm.killed_at[worker] - recorded.get(worker, arm.killed_at[worker])
                late = since_s > 1 / PACE + FLUSH_S  # a token's time and its flush: the next chunk was due
                each = math.floor(PACE * since_s) + 1 if late else math.ceil(PACE * FLUSH_S)
                assert regenerated <= samples * each, (
                    f"worker {worker} lost {regenerated} tokens of {samples} samples, {since_s:.2f} s after its last chunk"
                )
            else:
                assert notice, f"{arm.name}, worker {worker}: {reason}"
                assert regenerated == 0, (
                    f"{arm.name}, worker {worker}: {regenerated} tokens again in spite of notice"
                )
    assert sum(len(arm.lost) for arm in arms) >= 20
    assert sum(rows[w][3] for arm in arms for w in arm.lost) > 0, (
        "no token was in flight: the engines were lost between samples"
    )
    totals = play.ask(site, queries.load_report("lost_engines_by_cause"))
    assert sum(row[2] for row in totals) >= 20, totals
