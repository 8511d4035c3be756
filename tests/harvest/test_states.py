"""Every row of the table of Slurm's states, played through the tracker; and the page that shows the table is the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.model import Job, JobFlag, JobState, Node
from scavenger.cluster.slurm.text import parse_state
from scavenger.harvest.decide import decide
from scavenger.harvest.decide.decide import Cancel, HarvestCode
from scavenger.harvest.track import observed_jobs
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from tests.harvest.flat_limits import limits_with
from tests.harvest.states import ERROR_KINDS, STATES, State, error_kind_rows, state_rows
from tests.harvest.views import PARTITIONS, SHARED, node, ours, view
from tests.harvest.watch import A, Watch, running

PAGE = Path(__file__).resolve().parents[2] / "docs/slurm-states.md"
NODES = [node("node0"), *(node(name) for name in SHARED)]


@dataclass(frozen=True)
class Scene:
    """What the queue shows after the job ran on node1 from 0.5 on: `first` at 5, then `later` for good. `began`: whether it ran."""

    first: Sequence[Job]
    later: Sequence[Job]
    nodes: Sequence[Node] = tuple(NODES)
    began: bool = True


def seen(words: str, restarts: int = 0, **more: object) -> Job:
    """Our job in a state as Slurm prints it."""
    state, flags = parse_state(words)
    job = ours(A, 1, state, restart_count=restarts, start_time=0.5, **more)
    return replace(job, flags=flags)


def always(*jobs: Job, **more: object) -> Scene:
    return Scene(jobs, jobs, **more)  # type: ignore[arg-type]


BACK = seen("PENDING", 1, reason="BeginTime")
OVER: dict[str, Any] = {"nodes": ("node1",), "end_time": 4.0}
THEIRS = replace(running(), name="theirs", comment="")  # the same user's, who works by hand too
SCENES: dict[str, Scene] = {
    "PENDING": always(seen("PENDING", reason="Resources"), began=False),
    "CONFIGURING": always(seen("CONFIGURING"), began=False),
    "RUNNING": always(running()),
    "SUSPENDED": always(seen("SUSPENDED", nodes=("node1",))),
    "COMPLETING": always(seen("COMPLETING", nodes=("node1",))),
    "REQUEUED": always(seen("REQUEUED", 1)),
    "REQUEUE_HOLD": always(seen("REQUEUE_HOLD", 1, reason="JobHeldAdmin")),
    "SPECIAL_EXIT": always(seen("SPECIAL_EXIT", 1, reason="JobHeldUser")),
    "launch failed": always(seen("PENDING", 1, reason="launch_failed_requeued_held")),
    "PREEMPTED": Scene([seen("PREEMPTED")], [BACK]),
    "NODE_FAIL": Scene([seen("NODE_FAIL")], [BACK]),
    "BOOT_FAIL": Scene([seen("BOOT_FAIL")], [BACK]),
    "PREEMPTED, not requeued": always(seen("PREEMPTED")),
    "OUT_OF_MEMORY": always(seen("OUT_OF_MEMORY", exit_code=0, **OVER)),
    "FAILED": always(seen("FAILED", exit_code=1, **OVER)),
    "FAILED, 143": always(seen("FAILED", exit_code=143, **OVER)),
    "FAILED, 75": always(seen("FAILED", exit_code=75, **OVER)),
    "TIMEOUT": always(seen("TIMEOUT", **OVER)),
    "DEADLINE": always(seen("DEADLINE", **OVER)),
    "COMPLETED": always(seen("COMPLETED", **OVER)),
    "CANCELLED": always(seen("CANCELLED", **OVER)),
    "gone from the queue": always(),
    "purged": Scene([seen("FAILED", exit_code=1, **OVER)], []),
    "id given out again": always(THEIRS),
    "node drained": always(
        running(),
        nodes=[node("node1", 1, states=("mixed", "drain")), *(n for n in NODES if n.name != "node1")],
    ),
    "node not responding": always(running(), nodes=[node("node1", 1, states=("down", "not_responding"))]),
    "reservation ahead": always(running()),
    "partition down": always(running()),
}


def play(scene: Scene) -> tuple[Watch, bool]:
    """The watcher after all of it, and whether the router knew at once."""
    w = Watch()
    w.submit(A, 1)
    if scene.began:
        w.see(1, running(start_time=0.5))
    w.see(5, *scene.first, nodes=scene.nodes)
    told = bool(w.gone)
    for at in (20, 45, 60):
        w.see(at, *scene.later, nodes=scene.nodes)
    return w, told


@pytest.mark.parametrize("row", STATES, ids=lambda row: row.name)
def test_what_slurm_shows_leads_to_what_the_table_says(row: State) -> None:
    scene = SCENES[row.name]
    mine = [job for job in scene.first if job.name == A]
    shown = scene.later if row.observed is observed_jobs.ObservedState.ABSENT else mine
    listed = [job for job in shown if job.name == A]
    assert (
        observed_jobs.observed_state_of(listed[0]) if listed else observed_jobs.ObservedState.ABSENT
    ) is row.observed
    w, told = play(scene)
    assert [reason for _, reason in w.ends] == ([row.allocation] if row.allocation else [])
    assert told == row.told
    assert (A in w.tracker.intents) == row.stays
    assert len(w.of(rec.JobEnded)) == (not row.stays)
    died = [event for event in w.of(rec.Event) if event.kind == "engine_died"]
    assert bool(died) == (row.name in ("OUT_OF_MEMORY", "FAILED", "purged")), (
        "only an engine that failed by itself is blamed"
    )


def test_the_table_has_every_state_that_slurm_has_and_each_row_a_scene() -> None:
    names = {row.name for row in STATES}
    assert {str(state) for state in JobState} <= names
    assert {
        str(flag)
        for flag in (JobFlag.COMPLETING, JobFlag.REQUEUED, JobFlag.REQUEUE_HOLD, JobFlag.SPECIAL_EXIT)
    } <= names
    assert SCENES.keys() == names
    assert ERROR_KINDS.keys() == set(ErrorKind)


def test_the_page_shows_these_tables() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    for rows in (state_rows(), error_kind_rows()):
        start = tables.index(rows[0])
        assert tables[start : start + len(rows)] == rows


# ---------------------------------------------------------------- what follows, where it is more than the table's columns


def decided(
    w: Watch, *jobs: Job, engines: int = 1, nodes: Sequence[Node] = tuple(NODES), down: bool = False
) -> decide.HarvestDecision:
    """What the policy does with what the watcher knows after that view."""
    w.see(61, *jobs, nodes=nodes)
    shown = view(61, jobs, nodes)
    if down:
        shown = replace(shown, partitions=tuple(replace(p, up=p.name != "scavenge") for p in PARTITIONS))
    limits = limits_with(partition="scavenge", max_engines=4, max_pending=2)
    return decide.decide(
        shown, [Demand(1, "run", engines, 1, "wanted")], w.tracker.jobs({A: (1, 0.0)}), limits, 61
    )


@pytest.mark.parametrize("name", ["REQUEUE_HOLD", "SPECIAL_EXIT", "launch failed"])
def test_a_job_that_would_never_start_is_cancelled_and_another_submitted(name: str) -> None:
    decision = decided(play(SCENES[name])[0], *SCENES[name].later)
    assert [action.code for action in decision.actions] == [HarvestCode.HELD, HarvestCode.WANTED]


def test_an_id_that_is_another_jobs_now_is_never_cancelled() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running(start_time=0.5))
    output = w.see(5, THEIRS)
    assert output.orphaned_jobs == ()
    assert w.tracker.job_ids() == frozenset()
    [event] = [event for event in w.of(rec.Event) if event.kind == "job_id_reused"]
    assert "job 1 " in event.reason
    w.see(6, THEIRS)
    assert len([event for event in w.of(rec.Event) if event.kind == "job_id_reused"]) == 1
    [job] = w.tracker.jobs({})
    assert job.job_id == 0, "nothing to name to Slurm"
    decision = decided(w, THEIRS, engines=0)
    assert not [
        action
        for action in decision.actions
        if isinstance(action, Cancel) and w.tracker.intents[action.intent_id].job_id
    ]


def test_a_job_that_a_controller_remembers_after_all_is_ours_again_under_its_intent() -> None:
    w = Watch()
    w.submit(A, 1)
    w.see(1, running(start_time=0.5))
    w.see(5, THEIRS)
    w.see(10, THEIRS, replace(running(start_time=0.5), job_id=8))
    assert w.tracker.job_ids() == {8}
    w.see(60, THEIRS, replace(running(start_time=0.5), job_id=8))
    assert A in w.tracker.intents


def test_a_drained_node_has_no_room_for_more_of_ours() -> None:
    scene = SCENES["node drained"]
    w, _ = play(scene)
    only = [replace(n, gpus_allocated=4) if n.name in ("node2", "node3") else n for n in scene.nodes]
    decision = decided(w, running(), engines=2, nodes=only)
    assert decision.code is HarvestCode.NO_CAPACITY


def test_a_node_that_was_lost_is_why_its_job_comes_back() -> None:
    scene = SCENES["node not responding"]
    w, _ = play(scene)
    w.see(61, BACK, nodes=scene.nodes)
    assert w.ends == [(0, "node_fail")]


def test_a_partition_that_is_down_gets_nothing_and_what_runs_there_goes_on() -> None:
    w, _ = play(SCENES["partition down"])
    decision = decided(w, running(), engines=3, down=True)
    assert (decision.actions, decision.code) == ((), HarvestCode.PARTITION_DOWN)


def test_a_look_at_the_queue_alone_is_not_enough_when_one_of_ours_left_its_gpus() -> None:
    w = Watch()
    w.submit(A, 1)
    assert not w.tracker.surprised([seen("PENDING")]), "it waits, as before"
    w.see(1, running(start_time=0.5))
    assert not w.tracker.surprised([running(start_time=0.5)])
    for jobs in (
        [],
        [BACK],
        [seen("COMPLETING", nodes=("node1",))],
        [replace(running(), restart_count=1)],
        [seen("FAILED", **OVER)],
    ):
        assert w.tracker.surprised(jobs)
