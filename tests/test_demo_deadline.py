"""How long the demo gives its training job, and which log it names when that was not enough."""

from __future__ import annotations

from pathlib import Path

from scavenger.cluster.model import JobState
from scavenger.demo import session


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
