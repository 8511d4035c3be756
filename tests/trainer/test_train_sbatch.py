"""`scripts/train.sbatch`, on a real Slurm and against commands of ours: told to end it goes on by itself, cancelled it does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scavenger.cluster.model import JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from tests.clusters import unfinished, wait_for

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/train.sbatch"
#: Stands for the launcher: its first life saves when told to, its second trains to the end.
LAUNCHER = """#!/bin/sh
echo "life ${{SLURM_RESTART_COUNT:-0}} $*" >> {folder}/lives
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0
trap 'exit {code}' USR1
touch {folder}/started
while :; do sleep 0.1; done
"""


def submitted(sandbox: SlurmSandbox, folder: Path, code: int) -> int:
    """The job, once its first life is at work."""
    fake = folder / "python"
    fake.write_text(LAUNCHER.format(folder=folder, code=code))
    fake.chmod(0o755)
    script = str(shutil.copy(SCRIPT, folder))
    told = sandbox.run(
        "sbatch",
        "--parsable",
        "--partition=reserved",
        f"--output={folder}/log",
        f"--chdir={folder}",
        f"--export=ALL,SCAVENGER_PYTHON={fake}",
        script,
        "run.toml",
        "--resume",
        "auto",
    )
    wait_for("the first life", (folder / "started").exists, 60)
    return int(told)


@pytest.mark.slurm
@pytest.mark.parametrize("code", [143, 75])
def test_a_job_told_to_end_puts_itself_back_and_its_next_life_gets_the_same_command(
    code: int, slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    job = submitted(slurm_sandbox, tmp_path, code)
    slurm_sandbox.run(
        "scancel", "--batch", "--signal=USR1", str(job)
    )  # what --signal=B:USR1@180 does before the time limit
    wait_for("the second life", lambda: (tmp_path / "lives").read_text().count("life") == 2, 90)
    assert (tmp_path / "lives").read_text().splitlines() == [
        f"life {n} -m trainer.launch run.toml --resume auto" for n in (0, 1)
    ]
    assert f"requeued itself (trainer's code {code})" in (tmp_path / "log").read_text()


@pytest.mark.slurm
def test_a_cancelled_job_stays_cancelled(slurm_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    job = submitted(slurm_sandbox, tmp_path, 143)
    cluster = SlurmCluster(slurm_sandbox.env)
    cluster.cancel((job,))
    wait_for("the job to be gone", lambda: not unfinished(cluster.view()), 120)
    assert (tmp_path / "lives").read_text().count("life") == 1
    assert [found.state for found in cluster.view().jobs if found.job_id == job] in ([], [JobState.CANCELLED])


def played(
    folder: Path, code: int, restarts: int, scontrol: str = "exit 0"
) -> subprocess.CompletedProcess[str]:
    """The script, where the trainer ends with `code` and Slurm's commands are ours."""
    bodies = {
        "squeue": "echo RUNNING",
        "scontrol": f'echo "$*" >> {folder}/asked\n{scontrol}',
        "sleep": "exit 0",
        "python3": f"echo trained\nexit {code}",
    }
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    copy = shutil.copy(SCRIPT, folder)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "SCAVENGER_PYTHON", "SCAVENGER_BACKEND")
    }
    environ = kept | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    return subprocess.run(
        ["bash", copy, "run.toml"],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize(
    "answer",
    ["exit 1", f'[ "$(grep -c show "$(dirname "$0")/asked")" -gt 1 ] || exit 1\necho " Command={SCRIPT} "'],
)
def test_a_controller_that_does_not_answer_ends_no_training(answer: str, tmp_path: Path) -> None:
    if (
        "exit 1\n" in answer
    ):  # it answers in the end: where the script lies has no venv here, so that the same python3 is found
        answer = answer.replace(str(SCRIPT), str(tmp_path / "train.sbatch"))
    done = played(tmp_path, 0, 0, answer)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert (tmp_path / "asked").read_text().count("show job -o 7") > 1, "it asked again"


@pytest.mark.parametrize(("code", "restarts", "back"), [(75, 9, True), (75, 10, False), (143, 10, True)])
def test_a_job_whose_rank_hangs_in_every_life_is_put_back_ten_times_at_most(
    code: int, restarts: int, back: bool, tmp_path: Path
) -> None:
    done = played(tmp_path, code, restarts)
    assert done.returncode == code
    assert ("requeue 7" in (tmp_path / "asked").read_text()) is back
    assert ("restarted 10 times already: not put back" in done.stderr) is not back


@pytest.mark.slurm
def test_a_job_whose_launcher_cannot_start_says_so_in_its_logs_last_line(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    missing = tmp_path / "no-such-python"
    told = slurm_sandbox.run(
        "sbatch",
        "--parsable",
        "--partition=reserved",
        f"--output={tmp_path}/log",
        f"--chdir={tmp_path}",
        f"--export=ALL,SCAVENGER_PYTHON={missing}",
        str(SCRIPT),
        "run.toml",
    )
    cluster = SlurmCluster(slurm_sandbox.env)
    wait_for("the job to be gone", lambda: int(told) not in unfinished(cluster.view()), 60)
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith(f"training job: SCAVENGER_PYTHON={missing} cannot be started on ")
    assert "remedy: " in last
    [found] = [job for job in cluster.view().jobs if job.job_id == int(told)]
    assert (found.state, found.exit_code) == (JobState.FAILED, 127)


@pytest.mark.slurm
@pytest.mark.mpi
def test_a_job_whose_ranks_cannot_reach_one_another_fails_soon_with_why_in_its_logs_last_line(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    """The real launcher under the real script: the user's own variable forbids every transport."""
    pytest.importorskip("mpi4py")
    (tmp_path / "run.toml").write_text(
        '[run]\nname="r"\nsteps=1\nstate_dir="s"\nout_dir="o"\n[model]\npath="m"\ncontext_length=24\n'
        "[sampling]\nmax_tokens=8\n[reserved]\nworkers=1\n"
    )
    told = slurm_sandbox.run(
        "sbatch",
        "--parsable",
        "--partition=reserved",
        "--ntasks=2",
        f"--output={tmp_path}/log",
        f"--chdir={tmp_path}",
        f"--export=ALL,SCAVENGER_PYTHON={sys.executable},PYTHONPATH={SCRIPT.parents[1]},OMPI_MCA_btl=self,OMPI_MCA_pml=ob1",
        str(SCRIPT),
        "run.toml",
    )
    cluster = SlurmCluster(slurm_sandbox.env)
    wait_for("the job to be gone", lambda: int(told) not in unfinished(cluster.view()), 120)
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("launch: 2 ranks cannot reach one another by MPI (Open MPI ")
    assert "): srun --mpi=pmix with " in last, "the launcher that this Open MPI was tried by"
    assert "mpirun with " in last
    [found] = [job for job in cluster.view().jobs if job.job_id == int(told)]
    assert (found.state, found.exit_code) == (JobState.FAILED, 2)
    assert found.end_time - found.start_time < 60, "about 8 s on an idle machine"
