from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from trainer import launch

ROOT = Path(__file__).resolve().parents[2]
CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "r", "steps": 1, "state_dir": "/state", "out_dir": "/out"},
        "model": {"path": "/model", "context_length": 24},
        "sampling": {"max_tokens": 8},
        "reserved": {"workers": 2},
    }
)


def make(environ: dict[str, str], *arguments: str) -> launch.Plan:
    return launch.plan(CONFIG, Path("/run.toml"), arguments, {"SCAVENGER_PYTHON": "/py"} | environ)


def test_outside_slurm_ranks_and_engines_are_siblings() -> None:
    made = make({"SCAVENGER_RANKS": "1"}, "--resume", "none")
    assert launch.rank_argv(made, {}) == ["/py", "-m", "trainer", "/run.toml", "--resume", "none"]
    assert launch.engine_argv(made)[:5] == ["/py", "-m", "rollout", "--kind", "reserved"]
    assert made.workers == 2
    assert "/state/keys/owner.key" in made.engine


def test_under_slurm_each_engine_is_a_step_of_its_own() -> None:
    made = make({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SCAVENGER_MPI": "srun"})
    assert launch.rank_argv(made, {})[:4] == ["srun", "--mpi=pmix", "--overlap", "--ntasks=2"]
    assert launch.engine_argv(made)[:3] == ["srun", "--overlap", "--ntasks=1"]
    assert launch.environment({"SLURM_JOB_ID": "7"}, root=False)["SCAVENGER_JOB_ID"] == "7"


def test_the_local_backend_ignores_an_outer_slurm_job() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SCAVENGER_BACKEND": "local"}
    assert make(environ).ranks == 1
    assert not make(environ).slurm
    assert not [name for name in launch.environment(environ, root=True) if name.startswith("SLURM")]


@pytest.mark.parametrize("environ", [{"SCAVENGER_RANKS": "two"}, {"SCAVENGER_RANKS": "0"}, {"SCAVENGER_MPI": "mpich"}])
def test_variables_that_cannot_be_used_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        make(environ)


def test_where_srun_cannot_make_a_world_mpirun_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, body in {"srun": "exit 1", "mpirun": "exit 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = make({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})
    assert launch.rank_argv(made, os.environ)[:3] == [str(tmp_path / "mpirun"), "-n", "2"]


def test_a_dead_engine_comes_back_with_a_growing_wait_and_a_drained_one_stays_away(tmp_path: Path) -> None:
    mark = tmp_path / "lives"
    name = repr(str(mark))
    script = (
        f"import os; open({name}, 'a').write(os.environ['SCAVENGER_RESTART_COUNT']); os._exit(0 if os.path.getsize({name}) > 2 else 70)"
    )
    engine = launch.Engine([sys.executable, "-S", "-c", script], os.environ, 0)
    now, deadline = 0.0, time.monotonic() + 20
    waits = []
    while time.monotonic() < deadline and engine._start_at != float("inf"):
        before = engine._start_at
        engine.tend(now)
        if before != engine._start_at != float("inf"):
            waits.append(engine._start_at - now)
            now = engine._start_at
        time.sleep(0.01)
    engine.stop()
    assert mark.read_text() == "012"
    assert waits == [1.0, 2.0]


def test_the_job_ends_its_engines_with_the_ranks_status(tmp_path: Path) -> None:
    """The launcher's own process, with a stand-in for Python that tells the two apart."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\ncase "$2" in trainer) sleep 1; exit 5;; *) echo $$ > {tmp_path}/engine; exec sleep 60;; esac\n')
    fake.chmod(0o755)
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(
        '[run]\nname="r"\nsteps=1\nstate_dir="s"\nout_dir="o"\n[model]\npath="m"\ncontext_length=24\n[sampling]\nmax_tokens=8\n'
    )
    environ = dict(os.environ) | {"SCAVENGER_PYTHON": str(fake), "SCAVENGER_BACKEND": "local", "PYTHONPATH": str(ROOT)}
    environ.pop("SCAVENGER_RANKS", None)
    script = [sys.executable, "-m", "trainer.launch", str(run_toml)]
    done = subprocess.run(script, env=environ, timeout=30, check=False)
    assert done.returncode == 5
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "engine").read_text()), 0)
    process = subprocess.Popen(script, env=environ)
    (tmp_path / "engine").unlink()
    while not (tmp_path / "engine").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (5, 143)
