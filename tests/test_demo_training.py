"""A training job that died ends the demo: the decision, and on real clusters the time it takes and the words that come with it."""

from __future__ import annotations

import functools
import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from scavenger.cluster.model import Job, JobFlag, JobState
from scavenger.demo import session
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.demo.training import Training, log_tail
from scavenger.errors import ScavengerError
from tests.clusters import wait_for

FAKE = {
    "fails": "echo training step 1; echo 'launch: the ranks cannot reach one another' >&2; exit 3",
    "ends early": "echo nothing was trained; exit 0",
    "is cancelled": "echo at work; exec sleep 600",
}
WORDS = {
    "fails": ("ended as FAILED, exit code 3", "  launch: the ranks cannot reach one another"),
    "ends early": (
        "ended as COMPLETED, exit code 0, before its run was finished (the ledger says nothing)",
        "  nothing was trained",
    ),
    "is cancelled": ("ended as CANCELLED", "  at work"),
}


def job(state: JobState, *flags: JobFlag, reason: str = "", code: int = 0, restarts: int = 0) -> Job:
    return Job(
        7, "me", "reserved", state, frozenset(flags), reason=reason, exit_code=code, restart_count=restarts
    )


def test_a_job_that_ended_is_failed_at_once_and_with_its_exit_code() -> None:
    for state in (
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.NODE_FAIL,
        JobState.TIMEOUT,
        JobState.OUT_OF_MEMORY,
    ):
        verdict = Training(7).observe([job(state, code=9)], "active", 100.0)
        assert verdict.failed == f"training job 7 ended as {state}, exit code 9, before its run was finished"


def test_a_completed_job_is_done_only_with_its_run_and_the_ledger_may_lag() -> None:
    following, completed = Training(7), [job(JobState.COMPLETED)]
    assert not following.observe(completed, "active", 100.0).failed
    assert following.observe(completed, "finished", 100.5).done
    following = Training(7)
    assert [bool(following.observe(completed, "active", 100.0 + t).failed) for t in (0.0, 2.0, 3.5)] == [
        False,
        False,
        True,
    ]


def test_a_job_that_waits_or_was_requeued_goes_on_and_says_so() -> None:
    following = Training(7)
    assert (
        following.observe([job(JobState.PENDING, reason="Resources")], "", 0.0).phase
        == "the training job waits: Resources"
    )
    assert following.observe([job(JobState.PENDING)], "", 1.0).phase == "the training job waits"
    assert (
        "restart 1"
        in following.observe([job(JobState.PENDING, reason="BeginTime", restarts=1)], "", 400.0).phase
    )
    assert following.observe([job(JobState.RUNNING)], "", 401.0).phase == ""


def test_a_held_job_will_not_start_by_itself() -> None:
    verdict = Training(7).observe([job(JobState.PENDING, reason="launch_failed_requeued_held")], "", 0.0)
    assert verdict.failed == "training job 7 will not start: it is held (launch_failed_requeued_held)"


def test_a_job_that_left_the_queue_or_never_leaves_it_is_given_up_within_ten_seconds() -> None:
    for jobs, words in (
        ([], "not in the queue any more"),
        ([job(JobState.RUNNING, JobFlag.COMPLETING)], "is being ended"),
    ):
        following = Training(7)
        found = [following.observe(jobs, "active", float(t)).failed for t in range(10)]
        assert not found[0]
        assert words in found[-1]
        following.observe([job(JobState.RUNNING)], "active", 10.0)
        assert not following.observe(jobs, "active", 30.0).failed, "it was seen in between: counted afresh"


def test_a_queue_that_cannot_be_read_is_said_at_once_and_given_up_in_the_end() -> None:
    following = Training(7)
    assert (
        following.unreadable("squeue: no answer", 0.0).phase == "the queue cannot be read: squeue: no answer"
    )
    assert not following.unreadable("squeue: no answer", 59.0).failed
    assert (
        following.unreadable("squeue: no answer", 61.0).failed
        == "the queue could not be read for 60 s: squeue: no answer"
    )
    following = Training(7)  # another release's words: it would go on so
    found = [following.unreadable("exit_code is not a number", t, malformed=True).failed for t in (0.0, 8.5)]
    assert [bool(words) for words in found] == [False, True]


def test_of_an_empty_log_it_says_so() -> None:
    assert "nothing was written" in log_tail("\n\n")
    assert log_tail("\n".join(map(str, range(30)))).splitlines() == [f"  {n}" for n in range(10, 30)]


def _at_work(log: Path) -> bool:
    return "at work" in log.read_text()


@pytest.mark.parametrize("backend", [pytest.param("slurm", marks=pytest.mark.slurm), "local"])
def test_the_demo_ends_within_ten_seconds_of_its_training_jobs_end(backend: str, tmp_path: Path) -> None:
    options = session.DemoOptions(tmp_path)
    with DemoSite(SiteOptions(backend, tmp_path / "s", harvest={"enabled": False})) as site:
        for number, (what, body) in enumerate(FAKE.items()):
            fake = tmp_path / f"python{number}"
            fake.write_text(f"#!/bin/sh\n{body}\n")
            fake.chmod(0o755)
            log = site.dir / "train.log"
            log.write_text("")
            submitted = site.submit_training(tmp_path / "run.toml", env={"SCAVENGER_PYTHON": str(fake)})
            if what == "is cancelled":
                wait_for("the job is at work", functools.partial(_at_work, log))
                site.cluster.cancel((submitted,))
            screen = session.Screen(Console(file=io.StringIO()), 1, time.monotonic())
            with pytest.raises(ScavengerError) as caught:
                session._watch(options, site, submitted, None, screen)
            ended_at = next(found.end_time for found in site.cluster.jobs() if found.job_id == submitted)
            assert time.time() - ended_at < 10, what
            for words in (f"training job {submitted} ", *WORDS[what]):
                assert words in caught.value.cause, what
            assert caught.value.exit_code != 0
            assert caught.value.remedy == f"the whole log: {log}"
