"""How long the demo gives its training job, and which log it names when that was not enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scavenger.cluster.local.client import LocalServer
from scavenger.cluster.model import JobState
from scavenger.demo import session, site
from scavenger.errors import ClusterError, ScavengerError


def test_the_limit_begins_when_the_training_job_starts() -> None:
    deadline = session.Deadline(420.0, since=1000.0)  # whatever the boot and the model took until then
    assert deadline.passed(None, 0, 1100.0) == ""
    assert deadline.passed(JobState.PENDING, 0, 1400.0) == ""
    assert deadline.passed(JobState.RUNNING, 0, 1410.0) == ""
    assert deadline.passed(JobState.RUNNING, 0, 1830.0) == ""
    assert deadline.passed(None, 0, 1831.0) == "the training job took no step for 420 s, after 0"
    assert deadline.passed(JobState.COMPLETED, 0, 1831.0) == ""


def test_a_slow_run_that_goes_on_is_waited_for() -> None:
    deadline = session.Deadline(420.0, since=0.0)
    assert [deadline.passed(JobState.RUNNING, n, 400.0 * n) for n in range(10)] == [""] * 10
    assert (
        deadline.passed(JobState.RUNNING, 9, 3600.0 + 421.0)
        == "the training job took no step for 420 s, after 9"
    )


def test_a_job_that_never_starts_is_given_up_too() -> None:
    deadline = session.Deadline(420.0, since=1000.0)
    assert deadline.passed(JobState.PENDING, 0, 1421.0) == "the training job did not start within 420 s"


def test_the_log_that_has_something_in_it_is_named(tmp_path: Path) -> None:
    train, daemon = tmp_path / "train.log", tmp_path / "daemon.log"
    assert session._log_of_failure(tmp_path) == tmp_path
    daemon.write_text("serving\n")
    train.touch()
    assert session._log_of_failure(tmp_path) == daemon
    train.write_text("step 1\n")
    assert session._log_of_failure(tmp_path) == train


@pytest.mark.parametrize(
    ("body", "start_s", "cause"),
    [
        (
            "raise SystemExit(3)",
            30.0,
            r"it ended with exit status 3 after [0-9.]+ s, before .*; its log is empty",
        ),
        ("import os; os.kill(os.getpid(), 9)", 30.0, r"it ended by signal 9 after .*; its log is empty"),
        (
            "import sys; sys.stdin.read()",
            0.5,
            r"it still runs, and [0-9]+ s were waited until .*; its log is empty",
        ),
        ("raise SystemExit('no such key')", 30.0, r"exit status 1 after .*; its log's end:\nno such key"),
    ],
)
def test_of_a_daemon_that_did_not_start_it_is_said_what_was_waited_for(
    body: str, start_s: float, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mute_daemon.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(site, "START_S", start_s)
    told = list[str]()
    place = site.DemoSite(
        site.SiteOptions("local", tmp_path / "site", daemon_module="mute_daemon"), told.append
    )
    place.dir.mkdir()
    try:
        with pytest.raises(ScavengerError) as caught:
            place.start_daemon()
    finally:
        place.stop()
    assert re.search(cause, caught.value.cause), caught.value.cause
    assert str(place.state_dir / "rendezvous.json") in caught.value.cause
    assert str(place.dir / "daemon.log") in caught.value.remedy
    assert told[0] == "the cluster is up; the daemon has been starting for 0 s"


def test_of_a_local_cluster_that_did_not_start_it_is_said_how_it_ended(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ClusterError, match=r"file/cluster did not say that it is ready and ended \(exit status 1"
    ):
        LocalServer(tmp_path / "file" / "cluster").start()
