"""HarvestLimits by the hour of the week, the kill switch, and what it means when Slurm hides others' jobs."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.model import JobState
from scavenger.config import DaemonConfig, DaemonSection, HarvestSection, Hours
from scavenger.harvest.decide.decide import HarvestCode, HarvestDecision
from scavenger.harvest.limits import (
    Stop,
    StopState,
    drain,
    hidden_jobs,
    hours_now,
    limits_of,
    read_stop,
    resume,
    rules_of,
)
from scavenger.harvest.track.node_health import Health, HealthRules
from scavenger.harvest.track.tracker import Tracker
from tests.harvest.views import INFO, job, node, view

NOW = 1000.0


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


WORK = Hours(days="Mon-Fri", hours="8-18", max_engines=1)
NIGHT = Hours(days="Fri-Sat", hours="20-6", max_engines=9, max_gpus=16)


@pytest.mark.parametrize(
    ("when", "found"),
    [
        ("2026-11-20T08:00", WORK),
        ("2026-11-20T07:59", None),
        ("2026-11-20T18:00", None),  # a Friday
        ("2026-11-20T20:00", NIGHT),
        ("2026-11-21T05:59", NIGHT),
        ("2026-11-21T06:00", None),
        ("2026-11-22T05:59", NIGHT),
        ("2026-11-22T20:00", None),
        ("2026-11-23T05:59", None),  # Sunday's evening is nobody's
    ],
)
def test_the_hours_that_hold_now(when: str, found: Hours | None) -> None:
    assert hours_now((WORK, NIGHT), "UTC", at(when)) == found


def test_hours_are_those_of_the_site_s_clock() -> None:
    assert hours_now((WORK,), "Europe/Berlin", at("2026-11-20T07:30")) == WORK
    assert (
        hours_now((Hours(days="Sun-Mon", max_gpus=3),), "America/New_York", at("2026-11-24T03:00"))
        is not None
    )


def config(**harvest: Any) -> DaemonConfig:
    return DaemonConfig(
        daemon=DaemonSection(state_dir=Path("/nowhere")),
        harvest=HarvestSection(max_engines=4, max_gpus=8, **harvest),
    )


def test_what_the_hours_name_replaces_the_limit_and_the_rest_stays() -> None:
    health = Health(HealthRules(3, 60.0, 1.0))
    settings = config(schedule=[WORK, NIGHT])
    found = [
        limits_of(settings, health, 30.0, at(when))
        for when in ("2026-11-20T09:00", "2026-11-20T21:00", "2026-11-20T19:00")
    ]
    assert [(limits.caps.max_engines, limits.caps.max_gpus) for limits in found] == [(1, 8), (9, 16), (4, 8)]


@pytest.mark.parametrize(
    ("restricted", "sole", "blind"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_hidden_jobs_leave_only_partitions_in_which_nobody_is_our_peer(
    restricted: bool, sole: bool, blind: bool
) -> None:
    limits = limits_of(
        config(sole_user=sole),
        Health(HealthRules(3, 60.0, 1.0)),
        30.0,
        NOW,
        hidden="PrivateData",
        restricted=restricted,
    )
    assert (limits.restrictions.blind, limits.restrictions.hidden) == (blind, "PrivateData")


PRIVATE = replace(INFO, private=frozenset({"jobs", "usage"}))
RUNS = job(1, JobState.RUNNING, nodes=("node1",), gpus_by_node=(("node1", 1),), gpus=1)
MINE = replace(RUNS, job_id=2, user=INFO.user)


@pytest.mark.parametrize(
    ("info", "jobs", "taken", "sees_all", "said"),
    [
        (INFO, [], 3, False, ""),  # nothing is private: the GPUs are some that Slurm counts otherwise
        (PRIVATE, [RUNS, MINE], 2, False, ""),  # an operator: everything taken is explained
        (PRIVATE, [RUNS, MINE], 3, False, "1 GPUs are taken"),  # a coordinator: some of the others' are seen
        (PRIVATE, [MINE], 1, False, "no other user's job"),
        (PRIVATE, [MINE], 1, True, ""),
        (
            PRIVATE,
            [replace(RUNS, state=JobState.COMPLETED, end_time=NOW - 60)],
            1,
            False,
            "",
        ),  # it ended between two commands
        (
            PRIVATE,
            [replace(RUNS, state=JobState.COMPLETED, end_time=NOW - 600)],
            1,
            False,
            "1 GPUs are taken",
        ),
    ],
)
def test_whether_others_jobs_are_hidden(
    info: Any, jobs: list[Any], taken: int, sees_all: bool, said: str
) -> None:
    found = hidden_jobs(info, view(NOW, jobs, [node("node1", taken)]), sees_all, NOW)
    assert (said in found) if said else (found == "")


# ---------------------------------------------------------------- the kill switch


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("", Stop("the stop file")),
        ("now\n", Stop("the stop file", True)),
        ("now power cut at 9", Stop("the stop file: power cut at 9", True)),
        ("nowadays nobody harvests", Stop("the stop file: nowadays nobody harvests")),
        ("drain by bob", Stop("the stop file: by bob")),
    ],
)
def test_what_a_stop_file_says(tmp_path: Path, text: str, stop: Stop) -> None:
    path = tmp_path / "stop"
    assert read_stop(path, "the stop file") is None
    path.write_text(text)
    assert read_stop(path, "the stop file") == stop


def test_a_stop_file_that_cannot_be_read_stops(tmp_path: Path) -> None:
    (tmp_path / "stop").mkdir()
    found = read_stop(tmp_path / "stop", "the stop file")
    assert found is not None
    assert "cannot be read" in found.reason


def test_a_stop_file_that_is_no_regular_file_stops_and_hangs_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stop")
    found: list[Stop | None] = []
    reader = threading.Thread(
        target=lambda: found.append(read_stop(tmp_path / "stop", "the stop file")), daemon=True
    )
    reader.start()
    reader.join(10.0)
    assert found == [Stop(f"the stop file ({tmp_path / 'stop'}) cannot be read: it is no regular file")]


def test_a_drain_holds_until_it_is_undone_and_its_change_is_told_once(tmp_path: Path) -> None:
    settings = DaemonConfig(
        daemon=DaemonSection(state_dir=tmp_path), harvest=HarvestSection(stop_file=tmp_path / "stop")
    )
    stop_state, tracker = StopState(lambda: settings), Tracker(rules_of(settings, "u", "me"))

    def stop() -> tuple[str, bool]:
        stop_state.poll()
        limits = stop_state.update_limits(view(NOW), PRIVATE, tracker, 30.0, NOW)
        assert stop_state.stop_read == stop_state.stop_in_force
        return limits.restrictions.stop, limits.restrictions.stop_now

    assert stop() == ("", False)
    drain(tmp_path, "alice: a talk", at_once=False)
    assert stop() == ("scavenger drain: alice: a talk", False)
    (tmp_path / "stop").write_text("now")
    assert stop() == ("the stop file", True)
    drain(tmp_path, "alice", at_once=True)
    assert stop() == ("the stop file", True)
    (tmp_path / "stop").unlink()
    assert stop() == ("scavenger drain: alice", True)
    assert resume(tmp_path)
    assert not resume(tmp_path)
    assert stop() == ("", False)
    assert [event.kind for event in stop_state.events] == [
        "voluntary_preemption_off",
        *["harvest_stopped"] * 3,
        "harvest_resumed",
    ]


def test_since_when_a_job_could_start_is_remembered_while_it_can(tmp_path: Path) -> None:
    settings = DaemonConfig(daemon=DaemonSection(state_dir=tmp_path))
    stop_state, tracker = StopState(lambda: settings), Tracker(rules_of(settings, "u", "me"))
    for now, could in ((1.0, (7,)), (2.0, (7, 8)), (3.0, (8,)), (4.0, (8, 7))):
        stop_state.decided(HarvestDecision((), "", HarvestCode.SERVED, could), now)
    assert stop_state.update_limits(view(NOW), INFO, tracker, 30.0, NOW).yielding.could_start_since == (
        (8, 2.0),
        (7, 4.0),
    )
