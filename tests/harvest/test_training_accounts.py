"""The Slurm account of a training job, from a real Slurm's queue through the ledger to the hours by user and account."""

from __future__ import annotations

import getpass
from pathlib import Path

import msgspec
import pytest

from scavenger.cluster.model import Job, JobSpec, JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm import json_output, runner
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.harvest.track.training_jobs import TrainingGpus
from scavenger.ledger import records as rec
from tests.clusters import layout_for_tests, wait_for
from tests.ledger.examples import CONFIG, T0, written
from tests.ledger.test_reports import answers


def trains(sandbox: SlurmSandbox, account: str = "") -> Job:
    """A job on the reserved partition, once it has started; its account is the same in fields and in JSON."""
    cluster = SlurmCluster(sandbox.env)
    script = "#!/bin/bash\nsleep 300\n"
    number = cluster.submit(JobSpec("train", "", "reserved", script, gpus=1, account=account, workdir="/tmp"))

    def found() -> list[Job]:
        return [one for one in cluster.jobs() if one.job_id == number and one.state is JobState.RUNNING]

    wait_for(f"job {number} runs", lambda: bool(found()))
    (job,) = found()
    printed = runner.asked(json_output.jobs_argv(), sandbox.env, 20.0).stdout
    assert [one.account for one in json_output.parse_jobs(printed) if one.job_id == number] == [job.account]
    return job


def hours(tmp_path: Path, *jobs: Job) -> list[tuple[object, ...]]:
    """What the report says where run n has the n-th of these training jobs, and an engine that had a GPU for n hours."""
    records: list[rec.Record] = []
    for n, job in enumerate(jobs, 1):
        seen = TrainingGpus().observe([(n, job.job_id, getpass.getuser())], [job], job.start_time + 1.0)
        began = job.start_time + 2.0
        records += [
            rec.RunCreated(n, f"r{n}", "KEY", 17, CONFIG, "{}", "/models/tokenizer.json", T0),
            *seen,
            rec.JobIntended(f"i{n}", n, "scavenge", 1, f"k{n}", began),
            rec.AllocationStarted(f"i{n}", 0, 900 + n, "gpu1", 1, began),
            rec.AllocationEnded(f"i{n}", 0, "preempted", began + 3600.0 * n),
        ]
    url = f"sqlite:///{tmp_path}/ledger.sqlite3"
    written(url, [records])
    rows = answers(url, "harvested_gpu_hours_by_account")
    return [(row["owner"], row["account"], row["runs"], row["gpu_hours"]) for row in rows]


@pytest.mark.slurm
def test_where_slurm_keeps_no_accounts_the_hours_are_of_none(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    job = trains(slurm_sandbox)
    assert job.account == ""
    assert hours(tmp_path, job) == [("KEY", "none", 1, 1)]


@pytest.mark.long
@pytest.mark.accounting
def test_the_hours_are_of_the_account_that_the_training_job_was_submitted_to(tmp_path: Path) -> None:
    with SlurmSandbox(msgspec.structs.replace(layout_for_tests(), accounting=True)) as sandbox:
        for words in (
            ("add", "account", "physics", "Description=physics", "Organization=site"),
            ("add", "user", getpass.getuser(), "Account=physics"),
        ):
            sandbox.run("sacctmgr", "-i", *words)
        site, first, second = (trains(sandbox, account) for account in ("site", "physics", "physics"))
        assert [site.account, first.account, second.account] == ["site", "physics", "physics"]
        assert trains(sandbox).account, "of a user's own choice, or the default one"
    assert hours(tmp_path, site, first, second) == [("KEY", "physics", 2, 5), ("KEY", "site", 1, 1)]
