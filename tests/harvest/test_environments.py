"""Environment workers' jobs: where they start, for whom they leave, and how the session submits and cancels them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.model import JobState, Node
from scavenger.config import DaemonConfig, DaemonSection, HarvestSection
from scavenger.harvest.decide.actions import Cancel, CancelPending, HarvestCode, OurJob, Submit
from scavenger.harvest.decide.environments import EnvironmentDecision, EnvironmentLimits, decide_environments
from scavenger.harvest.execute import job_script
from scavenger.harvest.harvester import _is_own
from scavenger.harvest.session import CancelJobs, Commit, HarvestSession, Outcome, SubmitJob, resume
from scavenger.harvest.track import set_up
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import EnvironmentDemand
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import SHARED, USER, job, node, ours, view
from tests.harvest.watch import RULES

A, B, C = (f"scv-{number:016x}" for number in (0xA, 0xB, 0xC))
FILE = "/home/me/out/environment-workers.json"
WANT = EnvironmentDemand(1, "run", 2, FILE, "me")
MOST = EnvironmentLimits(4, 8, 4096)
LIMITS = limits_with(
    "scavenge", max_engines=4, max_pending=8, cpus_per_engine=8, memory_mb_per_engine=1000, user=USER
)


def decided(
    nodes: dict[str, Node] | None = None,
    queue: tuple[Any, ...] = (),
    mine: tuple[OurJob, ...] = (),
    **more: Any,
) -> EnvironmentDecision:
    there = {name: node(name, 4, cpus_allocated=32) for name in SHARED} | (nodes or {})
    seen = view(100.0, queue, tuple(there.values()))
    demand, most = more.pop("demand", [WANT]), more.pop("most", MOST)
    engines = more.pop("engines", {})
    return decide_environments(seen, demand, mine, engines, limits_with(LIMITS, **more), most, 100.0)


def of_ours(name: str, job_id: int, *, waits: bool = False, at: str = "node1", run_id: int = 1) -> OurJob:
    return OurJob(name, run_id, job_id, 0, waits, "" if waits else at, pinned=at, started_at=50.0)


def test_each_is_submitted_for_the_node_with_the_most_idle_cpus_and_asks_for_no_gpu() -> None:
    found = decided({"node2": node("node2", 4, cpus_allocated=10)})
    assert [(one.nodelist, one.gpus, one.cpus, one.memory_mb, one.environment) for one in found.actions] == [  # type: ignore[union-attr]
        (("node2",), 0, 8, 4096, FILE),
        (("node2",), 0, 8, 4096, FILE),
    ]
    assert found.code is HarvestCode.SERVED


def test_the_cpus_and_the_memory_of_engines_on_idle_gpus_stay_free() -> None:
    full = {name: node(name, 4, cpus_allocated=64) for name in SHARED}
    idle = node("node1", 0, cpus_allocated=0)  # 4 idle GPUs: 32 of its 64 CPUs are engines'
    found = decided(full | {"node1": idle}, demand=[replace(WANT, workers=9)], most=replace(MOST, most=9))
    assert len(found.actions) == 4
    assert found.code is HarvestCode.NO_CAPACITY
    short = replace(idle, memory_mb=4 * 1000 + 4095)
    assert decided(full | {"node1": short}).actions == ()


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"most": replace(MOST, most=0)}, HarvestCode.MAX_ENVIRONMENTS),
        ({"max_pending": 0}, HarvestCode.MAX_PENDING),
        ({"stop": "an admin said so"}, HarvestCode.STOPPED),
        ({"not_before": 200.0, "not_before_reason": "the last one failed"}, HarvestCode.BACKOFF),
        ({"stale_s": -1.0}, HarvestCode.STALE_VIEW),
        ({"demand": []}, HarvestCode.NO_RUN),
        ({"quarantined": tuple((name, "bad") for name in SHARED)}, HarvestCode.NO_CAPACITY),
    ],
)
def test_nothing_starts_and_the_decision_says_why(changed: dict[str, Any], code: HarvestCode) -> None:
    found = decided(**changed)
    assert (found.actions, found.code) == ((), code)
    assert found.reason


def test_another_user_s_job_that_our_workers_keep_from_starting_gets_their_place_at_once() -> None:
    full = {name: node(name, 4, cpus_allocated=64) for name in SHARED}
    waits = job(9, gpus=0, cpus=8)
    found = decided(full, (waits,), (of_ours(A, 1), of_ours(B, 2, at="node2")))
    assert {type(one) for one in found.actions} == {Cancel}
    assert {one.intent_id for one in found.actions} == {A, B}  # type: ignore[union-attr]
    assert {one.code for one in found.actions} == {HarvestCode.OTHER_USERS_PENDING}
    assert found.code is HarvestCode.OTHER_USERS_PENDING


def test_one_that_waits_for_more_than_we_have_or_has_room_takes_nothing_from_us() -> None:
    full = {name: node(name, 4, cpus_allocated=64) for name in SHARED}
    mine = (of_ours(A, 1), of_ours(B, 2))
    larger = decided(full, (job(9, gpus=0, cpus=60),), mine)
    assert larger.actions == ()
    elsewhere = decided(full | {"node3": node("node3", 4)}, (job(9, gpus=0, cpus=8),), mine)
    assert elsewhere.actions == ()
    held = decided(full, (job(9, gpus=0, cpus=8, reason="Dependency"),), mine)
    assert held.actions == ()


def test_one_that_lacks_what_we_cannot_see_gets_the_place_where_only_our_workers_are_in_its_way() -> None:
    """CPUs and GPUs are there, and Slurm says that something lacks: memory, of which a worker holds some."""
    nodes = {name: node(name, 4, cpus_allocated=40) for name in SHARED}
    mine = tuple(of_ours(f"scv-{i:016x}", i, at=name) for i, name in enumerate(SHARED, 1))
    found = decided(nodes, (job(9, gpus=0, cpus=8),), mine, demand=[replace(WANT, workers=9)])
    assert {type(one) for one in found.actions} == {Cancel}
    assert len(found.actions) == len(mine)
    priority = decided(
        nodes, (job(9, gpus=0, cpus=8, reason="Priority"),), mine, demand=[replace(WANT, workers=9)]
    )
    assert priority.actions == (), "it waits for its turn"


def test_none_is_submitted_for_a_node_that_a_waiting_job_could_use() -> None:
    found = decided({}, (job(9, gpus=0, cpus=8, reason="Priority"),))
    assert (found.actions, found.code) == ((), HarvestCode.OTHER_USERS_PENDING)


def test_a_file_that_is_another_user_s_or_that_no_script_can_name_is_not_our_own(tmp_path: Path) -> None:
    """Its path is what a run's owner says."""
    mine = tmp_path / "environment-workers.json"
    mine.touch()
    two_lines = tmp_path / "a\nb"
    two_lines.touch()
    others = ["/", "", str(tmp_path / "none"), "/a\0b", str(two_lines), "/" + "a" * 5000]
    assert [_is_own(str(file)) for file in (mine, *others)] == [True, os.getuid() == 0, *[False] * 5]


def test_what_no_run_wants_leaves_waiting_ones_first() -> None:
    mine = (of_ours(A, 1), of_ours(B, 2, waits=True), of_ours(C, 3, run_id=7))
    found = decided(mine=mine, demand=[replace(WANT, workers=1)])
    assert sorted((type(one).__name__, one.intent_id) for one in found.actions) == [  # type: ignore[union-attr]
        ("Cancel", C),
        ("CancelPending", B),
    ]
    lowered = decided(mine=(of_ours(A, 1), of_ours(B, 2, at="node2")), most=replace(MOST, most=1))
    assert [one.code for one in lowered.actions] == [HarvestCode.MAX_ENVIRONMENTS]


# ---------------------------------------------------------------- the session


def played(procedure: Any) -> list[Any]:
    """All its commands; a job gets the id 7."""
    commands, outcome = [], None
    while (command := resume(procedure, outcome)) is not None:
        commands.append(command)
        outcome = Outcome(100.0, job_id=7 if isinstance(command, SubmitJob) else 0)
    return commands


def session() -> HarvestSession:
    return HarvestSession(RULES, lambda run: (A, f"key of {run}" if run else ""))


def test_its_job_is_in_the_ledger_as_what_it_is_and_engines_never_hear_of_it() -> None:
    one = session()
    submit = Submit(1, "run", "scavenge", 0, "why", ("node1",), cpus=8, memory_mb=4096, environment=FILE)
    commands = played(
        one.perform_environments(EnvironmentDecision((submit,), "why", HarvestCode.WANTED), 100.0)
    )
    [durable] = [command.records for command in commands if isinstance(command, Commit)]
    [intended] = [record for record in durable if isinstance(record, rec.JobIntended)]
    assert (intended.kind, intended.gpus, intended.worker_key) == ("environment", 0, "")
    assert [record.policy for record in durable if isinstance(record, rec.Decision)] == ["environment"]
    assert (one.tracker.intents, list(one.environments.intents)) == ({}, [A])
    running = ours(A, 7, JobState.RUNNING, gpus=0, gpus_by_node=())
    output = one.observe(view(101.0, (running,)), {}, (), (), 101.0)
    assert output.orphaned_jobs == ()
    assert any(isinstance(record, rec.JobObserved) for record in output.records)
    gone = CancelPending(A, "no more", HarvestCode.NO_DEMAND)
    commands = played(one.perform_environments(EnvironmentDecision((gone,), "", HarvestCode.NO_RUN), 102.0))
    assert [command.job_ids for command in commands if isinstance(command, CancelJobs)] == [(7,)]


@pytest.mark.parametrize("exit_code", [1, set_up.NO_DAEMON])
def test_one_that_fails_is_called_so_and_no_engine_or_node_is_blamed(exit_code: int) -> None:
    one = session()
    submit = Submit(1, "run", "scavenge", 0, "why", ("node1",), cpus=8, memory_mb=4096, environment=FILE)
    played(one.perform_environments(EnvironmentDecision((submit,), "why", HarvestCode.WANTED), 100.0))
    running = ours(A, 7, JobState.RUNNING, gpus=0, gpus_by_node=(), nodes=("node1",), start_time=101.0)
    one.observe(view(101.0, (running,)), {}, (), (), 101.0)
    failed = replace(running, state=JobState.FAILED, exit_code=exit_code, end_time=105.0)
    records = one.observe(view(106.0, (failed,)), {}, (), (), 106.0).records
    said = f"environment worker's job 7 FAILED (exit code {exit_code}) after 4 s"
    assert [
        (event.kind, event.run_id, event.reason) for event in records if isinstance(event, rec.Event)
    ] == [("environment_died", 1, said)]
    assert not [record for record in records if isinstance(record, rec.EngineDied)]
    wants = one.decide_environments(view(107.0), [WANT], LIMITS, MOST, 107.0)
    assert (wants.code, wants.actions) == (HarvestCode.BACKOFF, ())
    assert said in wants.reason
    assert one.tracker.health.backoff() == (0.0, ""), "engines go on"
    assert one.environments.health.quarantined(107.0) == ()


def test_one_of_neither_kind_is_orphaned_and_a_restart_knows_both() -> None:
    one = session()
    strange = ours(C, 9, JobState.RUNNING)
    assert one.observe(view(1.0, (strange,)), {}, (), (), 1.0).orphaned_jobs == (9,)
    intents = [
        rec.OpenIntent(rec.JobIntended(A, 1, "scavenge", 1, "k", 0.0), 7, "RUNNING", 0, "node1", True),
        rec.OpenIntent(
            rec.JobIntended(B, 1, "scavenge", 0, "", 0.0, kind="environment"), 8, "RUNNING", 0, "node1", True
        ),
    ]
    one.restore(intents, (), 2.0)
    assert (list(one.tracker.intents), list(one.environments.intents)) == ([A], [B])


def test_its_script_starts_no_engine_and_names_no_key(tmp_path: Path) -> None:
    config = DaemonConfig(daemon=DaemonSection(state_dir=tmp_path), harvest=HarvestSection(gpu_type="h100"))
    submit = Submit(1, "run", "scavenge", 0, "why", ("node1",), cpus=8, memory_mb=4096, environment=FILE)
    template = job_script.read_template(None)
    spec = job_script.job_spec(config, template, "slurm", "feedbeef", A, submit)
    assert (spec.gpus, spec.gpu_type, spec.cpus_per_task, spec.memory_mb, spec.requeue) == (
        0,
        "",
        8,
        4096,
        True,
    )
    assert f"-m trainer.episodes.remote_worker {FILE}" in spec.script
    assert "-m rollout" not in spec.script
    assert ".key" not in spec.script
