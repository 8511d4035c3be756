"""What the daemon says of training jobs: the judgement, and a real job of a real Slurm that dies while its run is open."""

from __future__ import annotations

import getpass
import json
import time
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import Job, JobState
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.errors import DaemonUnavailable
from scavenger.ledger.read import reports
from scavenger.observe import status
from scavenger.observe.training import TrainingJob, TrainingJobs, UnclosedRun
from scavenger.weights.source import WeightServer
from tests.system import play, scripted
from tests.system.conftest import small_model  # noqa: F401  a fixture

RUN = UnclosedRun("r", 7, heard_at=100.0, user="me")


def job(state: JobState, *, code: int = 0, ended: float = 100.0, restarts: int = 0) -> Job:
    return Job(7, "me", "reserved", state, exit_code=code, end_time=ended, restart_count=restarts)


def test_an_ended_job_of_an_open_run_is_news_once() -> None:
    jobs = TrainingJobs()
    assert jobs.observe([RUN], [job(JobState.RUNNING)]) == ()
    assert jobs.found == (TrainingJob("r", 7, "RUNNING"),)
    failed = [job(JobState.FAILED, code=3)]
    assert [one.ended for one in jobs.observe([RUN], failed)] == [
        "ended as FAILED, exit code 3, and its run is open"
    ]
    assert jobs.observe([RUN], failed) == ()
    assert jobs.found[0].ended, "the status goes on to say so"
    assert jobs.observe([], failed) == ()
    assert jobs.found == (), "its run was closed"


def test_a_requeued_job_is_none_that_ended() -> None:
    jobs = TrainingJobs()
    assert jobs.observe([RUN], [job(JobState.PENDING, restarts=2)]) == ()
    assert jobs.found[0].state == "PENDING, restart 2"


def test_a_run_that_names_another_user_s_job_learns_nothing_of_it() -> None:
    jobs = TrainingJobs()
    hers = UnclosedRun("r", 7, heard_at=100.0, user="ada")
    for state in (JobState.RUNNING, JobState.FAILED):
        assert jobs.observe([hers], [job(state)]) == ()
        assert jobs.found == ()
    assert jobs.observe([hers], []) == (), "and it is not missed when it leaves"


def test_a_job_is_missed_only_where_it_was_seen() -> None:
    jobs = TrainingJobs()
    assert jobs.observe([RUN], []) == (), "others' jobs may be private"
    jobs.observe([RUN], [job(JobState.RUNNING)])
    assert [one.ended for one in jobs.observe([RUN], [])] == ["is not in the queue any more"]


def test_a_number_that_is_another_job_s_is_not_judged() -> None:
    jobs = TrainingJobs()
    assert jobs.observe([RUN], [job(JobState.FAILED, ended=50.0)]) == (), (
        "its trainer called long after that job's end"
    )
    assert jobs.observe([UnclosedRun("r", 0, 100.0, "me")], [job(JobState.FAILED)]) == (), "of no Slurm job"
    assert jobs.found == ()


def test_the_status_says_it_to_people() -> None:
    ended = TrainingJob("r", 7, "FAILED", "ended as FAILED, exit code 3, and its run is open")
    assert status.trains(ended).startswith(
        "training  run r: job 7 ended as FAILED, exit code 3, and its run is open; its log"
    )
    assert status.trains(TrainingJob("r", 7, "RUNNING")) == "training  run r: job 7 RUNNING"


@pytest.mark.slurm
def test_the_daemon_reports_a_training_job_that_died_also_after_a_restart(
    tmp_path: Path,
    small_model: Path,  # noqa: F811
) -> None:
    options = SiteOptions("slurm", tmp_path, demo_layout(grace_s=2.0), poll_interval_s=0.3, max_engines=1)
    with DemoSite(options) as site, WeightServer() as source:
        fake = tmp_path / "python"
        fake.write_text("#!/bin/sh\nuntil [ -e die ]; do sleep 0.1; done\nexit 3\n")
        fake.chmod(0o755)
        run_toml = play.write_run(site, small_model, run={"name": "dies"})
        number = site.submit_training(run_toml, env={"SCAVENGER_PYTHON": str(fake)})
        with scripted.opened(run_toml, number) as run:
            scripted.publish(run, source, small_model, 0)
            play.wait_for("the status has the job", lambda: _states(site) == ["RUNNING"], 60)
        (site.dir / "die").touch()
        play.wait_for("the daemon says that it ended", lambda: bool(_log_line(site)), 60)
        found = play.job(site, number)
        assert found is not None
        assert time.time() - found.end_time < 10
        assert f"job_id={number} " in _log_line(site)
        assert 'reason="ended as FAILED, exit code 3, and its run is open"' in _log_line(site)
        play.wait_for("the status says so", lambda: _states(site) == ["FAILED"], 60)
        play.kill_daemon(site)
        (site.dir / "daemon.log").write_text("")
        site.start_daemon()
        play.wait_for("the next daemon says so too", lambda: f"job_id={number} " in _log_line(site), 60)
        [(job_id, user, gpus, lasted_s)] = play.ask(
            site, "SELECT job_id, user_name, gpus, ended_at - started_at FROM v_training_jobs"
        )
        assert (job_id, user) == (number, getpass.getuser())
        assert lasted_s == found.end_time - found.start_time, "Slurm's own times"
        [cost] = json.loads(reports.report(site.ledger_url, "run_cost", "json"))["rows"]
        assert cost["reserved_from"] == "training jobs"
        assert cost["reserved_gpu_hours"] == round(gpus * lasted_s / 3600, 4)


def _states(site: DemoSite) -> list[str]:
    try:
        return [one.state for one in status.read(site.state_dir).training]
    except DaemonUnavailable:
        return []


def _log_line(site: DemoSite) -> str:
    lines = (site.dir / "daemon.log").read_text().splitlines()
    return next((line for line in lines if 'event="training job ended"' in line), "")
