"""A researcher's own daemon on a real Slurm: in a small CPU job that comes back, and inside the training job, with which it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scavenger import resources, toml
from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import Job, JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import DaemonUnavailable
from scavenger.ledger.read import reports
from scavenger.observe import status
from scavenger.protocol import keys
from tests.clusters import unfinished
from tests.ledger.histories import fetch
from tests.system.play import ENDED, ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

PATIENCE_S = 300.0


def until(what: str, condition: Callable[[], Any], folder: Path) -> Any:
    from tests.system.play import wait_for

    try:
        return wait_for(what, condition, PATIENCE_S)
    except AssertionError as error:
        logs = "\n".join(
            f"---- {path}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(folder.rglob("*.log"))
        )
        raise AssertionError(f"{error}\n{logs}") from error


def generation(state_dir: Path) -> int:
    try:
        return keys.read_rendezvous(state_dir).generation
    except DaemonUnavailable:
        return 0


def job(cluster: SlurmCluster, job_id: int) -> Job:
    return next(one for one in cluster.view().jobs if one.job_id == job_id)


def sbatch(sandbox: SlurmSandbox, folder: Path, *argv: str) -> int:
    env = {
        **sandbox.env,
        "SCAVENGER_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["sbatch", "--parsable", *argv],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_daemon_in_a_cpu_job_comes_back_under_its_id_with_its_ledger_until_it_is_cancelled(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    state_dir, cluster = tmp_path / "state", SlurmCluster(slurm_sandbox.env)
    keys.init_state(state_dir, "ada")
    document: dict[str, Any] = {
        "daemon": {"state_dir": state_dir, "ledger": f"sqlite:///{tmp_path}/node-disk/ledger.sqlite3"},
        "cluster": {"backend": "slurm"},
        "harvest": {"enabled": False},
    }
    (tmp_path / "scavenger.toml").write_text(toml.dumps(document))
    script = str(resources.path("scripts/scavenger.sbatch"))
    job_id = sbatch(
        slurm_sandbox,
        tmp_path,
        "--partition=normal",
        f"--output={tmp_path}/job.log",
        script,
        "scavenger.toml",
    )
    until("the daemon serves", lambda: generation(state_dir) == 1, tmp_path)
    assert job(cluster, job_id).gpus == 0

    # a node of its own again: what lay on the first one's disk is not there
    subprocess.run(["scancel", "--signal=TERM", str(job_id)], env=slurm_sandbox.env, check=True, timeout=60)
    until("the job is back in the queue", lambda: job(cluster, job_id).restart_count == 1, tmp_path)
    (tmp_path / "node-disk").rename(tmp_path / "another-node-s-disk")
    until("the next daemon serves", lambda: generation(state_dir) == 2, tmp_path)
    lives = fetch(
        f"sqlite:///{tmp_path}/node-disk/ledger.sqlite3",
        "SELECT generation FROM generations ORDER BY generation",
    )
    assert [row[0] for row in lives] == [1, 2], "it went on with the ledger that the first one left"

    cluster.cancel((job_id,))
    until("the job has ended", lambda: job_id not in unfinished(cluster.view()), tmp_path)
    assert job(cluster, job_id).state is JobState.CANCELLED
    assert status.read(state_dir).state == "CLOSED", "it left well all the same"


def test_a_job_whose_configuration_cannot_be_used_ends_and_is_not_put_back(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    cluster = SlurmCluster(slurm_sandbox.env)
    (tmp_path / "scavenger.toml").write_text("[daemon]\n")
    script = str(resources.path("scripts/scavenger.sbatch"))
    job_id = sbatch(
        slurm_sandbox,
        tmp_path,
        "--partition=normal",
        f"--output={tmp_path}/job.log",
        script,
        "scavenger.toml",
    )
    until("the job has ended", lambda: job_id not in unfinished(cluster.view()), tmp_path)
    ended = job(cluster, job_id)
    assert (ended.state, ended.exit_code, ended.restart_count) == (JobState.FAILED, 2, 0)
    assert "'daemon.state_dir' is missing" in (tmp_path / "job.log").read_text()


@pytest.mark.long
@pytest.mark.mpi
def test_a_run_with_a_daemon_of_its_own_harvests_and_leaves_nothing(
    small_model: Path, tmp_path: Path
) -> None:
    state_dir = tmp_path / "state"
    keys.init_state(state_dir, "ada")
    document: dict[str, Any] = {
        "daemon": {"state_dir": state_dir},
        "cluster": {"backend": "slurm", "poll_interval_s": 1.0, "fast_poll_interval_s": 0.5, "absent_s": 1.0},
        "router": {"harvested_gpu_price": 0.0},  # so short a run would not earn an engine's start
        "harvest": {"partition": "scavenge", "max_engines": 1, "time_limit_s": 600.0},
    }
    (tmp_path / "scavenger.toml").write_text(toml.dumps(document))
    run: dict[str, Any] = {
        "run": {
            "name": "own",
            "seed": 7,
            "steps": 2,
            "state_dir": "state",
            "out_dir": "out",
            "max_engines": 1,
        },
        "daemon": {"embedded": True},
        "model": {"path": small_model, "context_length": 32},
        "data": {"task": "sort", "prompts_per_step": 4, "samples_per_prompt": 4},
        "sampling": {"max_tokens": 20},
        "engine": {
            "name": "reference",
            "max_batch": 4,
            "pace": 2.0,
        },  # slow enough that a harvested engine comes within a step
        "reward": {"function": "tests.system.rewards:even_share"},
        "reserved": {"workers": 1, "window": 0.0},
        "weights": {"dtype": "float32"},
    }
    (tmp_path / "run.toml").write_text(toml.dumps(run))
    with SlurmSandbox(demo_layout(nodes=2, gpus=1, grace_s=2.0)) as sandbox:
        cluster = SlurmCluster(sandbox.env)
        script = str(resources.path("scripts/train.sbatch"))
        argv = (
            "--partition=reserved",
            "--ntasks=1",
            "--gpus-per-node=1",
            f"--output={tmp_path}/train.log",
            script,
            "run.toml",
        )
        job_id = sbatch(sandbox, tmp_path, *argv)
        until("the training job has ended", lambda: job(cluster, job_id).state in ENDED, tmp_path)
        assert job(cluster, job_id).state is JobState.COMPLETED, (tmp_path / "train.log").read_text()
        until("its engines' jobs have ended", lambda: not unfinished(cluster.view()), tmp_path)
    assert status.read(state_dir).state == "CLOSED"
    ledger = f"sqlite:///{state_dir}/ledger.sqlite3"
    assert reports.check(ledger) == []
    ((steps,),) = fetch(ledger, "SELECT max(step) FROM steps WHERE purpose = 'train'")
    ((tokens,),) = fetch(
        ledger,
        "SELECT sum(n_tokens) FROM chunks JOIN workers ON workers.worker_id = chunks.worker_id WHERE kind = 'harvested'",
    )
    assert steps == 2
    assert tokens > 0, "no token was harvested"
