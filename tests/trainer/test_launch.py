from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scavenger.config import EngineSection, ReservedSection, RunConfig, TrainerSection
from scavenger.errors import ConfigError
from trainer import launch, reserved

ROOT = Path(__file__).resolve().parents[2]
CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "r", "steps": 1, "state_dir": "/state", "out_dir": "/out"},
        "model": {"path": "/model", "context_length": 24},
        "sampling": {"max_tokens": 8},
        "reserved": {"workers": 2},
    }
)


def make(environ: dict[str, str], *arguments: str) -> launch.LaunchPlan:
    return launch.plan(CONFIG, Path("/run.toml"), arguments, {"SCAVENGER_PYTHON": "/py"} | environ)


def test_outside_slurm_ranks_and_engines_are_siblings() -> None:
    made = make({"SCAVENGER_RANKS": "1"}, "--resume", "none")
    assert launch.rank_start(made, {}).argv == ("/py", "-m", "trainer", "/run.toml", "--resume", "none")
    assert launch.engine_argv(made, 0)[:5] == ["/py", "-m", "rollout", "--kind", "reserved"]
    assert made.engine_locations == (reserved.EngineLocation(), reserved.EngineLocation())
    assert "/state/keys/owner.key" in made.engine


def test_reserved_engines_are_the_run_s() -> None:
    config = CONFIG.model_copy(update={"engine": EngineSection(name="vllm")})
    made = launch.plan(config, Path("/run.toml"), (), {"SCAVENGER_PYTHON": "/py"})
    assert made.engine[made.engine.index("--engine") + 1] == "vllm"


def test_under_slurm_each_engine_is_a_step_of_its_own() -> None:
    made = make({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SCAVENGER_MPI": "srun"})
    argv = launch.srun_ranks(made, "srun --mpi=pmix", made.trainer)
    assert argv[:4] == ["srun", "--mpi=pmix", "--overlap", "--ntasks=2"]
    assert launch.engine_argv(made, 0)[:3] == ["srun", "--overlap", "--ntasks=1"]
    assert launch.environment({"SLURM_JOB_ID": "7"}, root=False)["SCAVENGER_JOB_ID"] == "7"


def test_reserved_engines_of_several_gpus_are_told_so_and_see_those_alone() -> None:
    config = CONFIG.model_copy(update={"reserved": ReservedSection(workers=2, gpus_per_engine=2)})
    environ = {
        "SCAVENGER_PYTHON": "/py",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_GPUS_ON_NODE": "4",
        "SCAVENGER_MPI": "srun",
    }
    made = launch.plan(config, Path("/run.toml"), (), environ)
    assert [launch.engine_argv(made, number)[6] for number in range(2)] == [
        "CUDA_VISIBLE_DEVICES=0,1",
        "CUDA_VISIBLE_DEVICES=2,3",
    ]
    assert made.engine_gpus == 2
    with pytest.raises(ConfigError, match="has 1 GPUs on a node"):
        launch.plan(config, Path("/run.toml"), (), environ | {"SLURM_GPUS_ON_NODE": "1"})


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_GPUS_ON_NODE": "4"}]
)
def test_a_job_that_could_stand_without_any_engine_is_not_started(environ: dict[str, str]) -> None:
    config = CONFIG.model_copy(update={"reserved": ReservedSection(workers=0)})
    with pytest.raises(
        ConfigError, match=r"reserved\.workers = 0 in run r: while no GPU is idle nothing generates"
    ) as refused:
        launch.plan(config, Path("/run.toml"), (), environ)
    assert "set reserved.workers = 1 or more" in refused.value.remedy


def test_the_local_backend_ignores_an_outer_slurm_job() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SCAVENGER_BACKEND": "local"}
    assert make(environ).ranks == 1
    assert not make(environ).slurm
    assert not [name for name in launch.environment(environ, root=True) if name.startswith("SLURM")]


@pytest.mark.parametrize(
    "environ", [{"SCAVENGER_RANKS": "two"}, {"SCAVENGER_RANKS": "0"}, {"SCAVENGER_MPI": "mpich"}]
)
def test_variables_that_cannot_be_used_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        make(environ)


def test_ranks_that_cannot_be_divided_as_the_run_says_are_not_started() -> None:
    config = CONFIG.model_copy(update={"trainer": TrainerSection(replicas=2)})
    environ = {"SCAVENGER_PYTHON": "/py", "SCAVENGER_RANKS": "3"}
    with pytest.raises(ConfigError, match=r"trainer\.replicas = 2 does not divide the training job's 3 rank"):
        launch.plan(config, Path("/run.toml"), (), environ)


def test_where_srun_cannot_make_a_world_mpirun_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = r'printf "MPI plugin types are...\n\tpmix\n"'
    srun = f'[ "$1" = --mpi=list ] && {listed} || {{ echo no pmix here >&2; exit 1; }}'
    for name, body in {"srun": srun, "mpirun": "exit 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = make({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})
    start = launch.rank_start(made, os.environ)
    assert start.argv == (str(tmp_path / "mpirun"), "-n", "2", *made.trainer)
    assert "2 ranks met under mpirun" in start.reason
    assert "(srun --mpi=pmix with its own settings: no pmix here)" in start.reason


#: What rank 0 says when engines may be started, in a stand-in's shell.
WAKE = """echo '{"number": 1, "awake": true}' > $SCAVENGER_ENGINES/w; mv $SCAVENGER_ENGINES/w $SCAVENGER_ENGINES/wanted.json"""


def fake_python(folder: Path, body: str) -> Path:
    """A stand-in for Python, called as `-m trainer` for the rank and as `-m rollout` for the engine."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{body}\n")
    fake.chmod(0o755)
    return fake


def job(folder: Path, python: Path) -> tuple[list[str], dict[str, str]]:
    """The launcher's argv and environment."""
    run_toml = folder / "run.toml"
    run_toml.write_text(
        '[run]\nname="r"\nsteps=1\nstate_dir="s"\nout_dir="o"\n[model]\npath="m"\ncontext_length=24\n[sampling]\nmax_tokens=8\n'
    )
    environ = dict(os.environ) | {
        "SCAVENGER_PYTHON": str(python),
        "SCAVENGER_BACKEND": "local",
        "PYTHONPATH": str(ROOT),
    }
    environ.pop("SCAVENGER_RANKS", None)
    return [sys.executable, "-m", "trainer.launch", str(run_toml)], environ


def awaited(path: Path) -> int:
    """The process id that a stand-in wrote to `path`."""
    deadline = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return int(path.read_text())


def running(pid: int) -> bool:
    """Whether it is there and not merely waiting to be collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_job_ends_its_engines_with_the_ranks_status(tmp_path: Path) -> None:
    """The launcher's own process, with a stand-in for Python that tells the two apart."""
    fake = fake_python(
        tmp_path,
        f'case "$2" in trainer) {WAKE}; echo "$TTY_COMPATIBLE" > {tmp_path}/compatible; sleep 2; exit 5;; '
        f"*) echo $$ > {tmp_path}/engine; exec sleep 600;; esac",
    )
    script, environ = job(tmp_path, fake)
    done = subprocess.run(script, env=environ, timeout=90, check=False, stdout=subprocess.DEVNULL)
    assert done.returncode == 5
    assert (tmp_path / "compatible").read_text() == "0\n", "what writes to a log is no terminal"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "engine").read_text()), 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_ended_leaves_neither_engines_nor_ranks(number: signal.Signals, tmp_path: Path) -> None:
    fake = fake_python(
        tmp_path,
        f'case "$2" in trainer) {WAKE};; esac; echo $$ > {tmp_path}/$2.new; mv {tmp_path}/$2.new {tmp_path}/$2; exec sleep 600',
    )
    script, environ = job(tmp_path, fake)
    process = subprocess.Popen(script, env=environ)
    pids = [awaited(tmp_path / name) for name in ("trainer", "rollout")]
    process.send_signal(number)
    assert process.wait(90) in (143, -9)
    deadline = time.monotonic() + 60
    while alive := [pid for pid in pids if running(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def test_no_engine_is_started_before_rank_0_has_weights_for_it(tmp_path: Path) -> None:
    """Ranks that build their model change the memory of the GPUs on which an engine would measure what is free."""
    rank = tmp_path / "rank.py"
    rank.write_text(f"""
import os, time
from pathlib import Path
from trainer.engine_control import of_job

started = Path({str(tmp_path)!r}, "started")
engines = of_job(os.environ)
while engines.present() is None:
    time.sleep(0.01)  # the launcher has looked after its engines
time.sleep(1.0)
assert engines.present().running == () and not started.exists()
engines.want(True)
while not started.exists():
    time.sleep(0.01)
""")
    engine = f"touch {tmp_path}/started; exec sleep 600"
    fake = fake_python(tmp_path, f'case "$2" in trainer) exec {sys.executable} {rank};; *) {engine};; esac')
    script, environ = job(tmp_path, fake)
    done = subprocess.run(script, env=environ, timeout=90, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_engine_is_ended_when_rank_0_says_so_and_none_started_before_engines_are_to_be_awake(
    tmp_path: Path,
) -> None:
    """Stand-ins: an engine that is deaf to SIGTERM; a rank that plays rank 0's end of the control."""
    rank = tmp_path / "rank.py"
    rank.write_text(f"""
import os, time
from pathlib import Path
from trainer.engine_control import of_job

def until(condition):
    while not condition():
        time.sleep(0.01)

def present(running):
    return lambda: (found := engines.present()) is not None and (found.slots, slots_of(found)) == (("0",), running)

def slots_of(found):
    return tuple(name.rpartition(".")[0] for name in found.running)

lives = Path({str(tmp_path)!r}, "lives")
engines = of_job(os.environ)
engines.want(True)
until(lambda: lives.exists() and lives.read_text() == "0 ")
engines.want(False)
until(present(("0",)))
engines.end(engines.present().running, "it did not acknowledge")
until(present(()))
time.sleep(2.5)  # longer than the wait after which an engine is started again
assert lives.read_text() == "0 ", lives.read_text()
engines.want(True)
until(present(("0",)))
until(lambda: lives.read_text() == "0 1 ")
""")
    deaf = f"trap '' TERM; printf '%s ' $SCAVENGER_RESTART_COUNT >> {tmp_path}/lives; while :; do sleep 600; done"
    fake = fake_python(tmp_path, f'case "$2" in trainer) exec {sys.executable} {rank};; *) {deaf};; esac')
    script, environ = job(tmp_path, fake)
    done = subprocess.run(script, env=environ, timeout=90, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "launch: reserved engine 0 is ended: it did not acknowledge" in done.stdout


def test_a_run_that_succeeded_says_finished_last_and_its_engines_end_without_a_word(tmp_path: Path) -> None:
    """The daemon lets them go when the run is closed, and would refuse another one; the ranks take seconds to end after that."""
    gone, lives = tmp_path / "gone", tmp_path / "lives"
    rank = tmp_path / "rank.py"
    rank.write_text(f"""
import os, pathlib, time
from trainer import engine_control
engines = engine_control.of_job(os.environ)
engines.want(True)
while not pathlib.Path({str(lives)!r}).exists():
    time.sleep(0.01)
print("finished: 1 steps", flush=True)
engines.run_ends()
pathlib.Path({str(gone)!r}).touch()
time.sleep(2.5)  # longer than the wait after which an engine is started again
""")
    engine = f"echo life >> {lives}; while ! [ -e {gone} ]; do sleep 0.05; done; exit 0"
    fake = fake_python(tmp_path, f'case "$2" in trainer) exec {sys.executable} {rank};; *) {engine};; esac')
    script, environ = job(tmp_path, fake)
    done = subprocess.run(script, env=environ, timeout=90, check=False, capture_output=True, text=True)
    assert (done.returncode, lives.read_text()) == (0, "life\n"), done.stderr
    said = done.stdout.splitlines()
    assert said[-2:] == ["finished: 1 steps", "launch: the run is finished; its engines have ended"]
    assert not [line for line in said if "reserved engine" in line]
    assert done.stderr == ""


def test_a_job_whose_every_engine_is_refused_ends_with_their_reason(tmp_path: Path) -> None:
    fake = fake_python(
        tmp_path,
        f'case "$2" in trainer) {WAKE}; exec sleep 600;; *) echo "rollout: no such key" >&2; echo "  remedy: enroll" >&2; exit 78;; esac',
    )
    script, environ = job(tmp_path, fake)
    quick = "import sys; from trainer import launch, reserved; real = reserved.ended; "
    quick += "reserved.ended = lambda *end: (real(*end)[0], 0.05); sys.exit(launch.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", quick, script[-1]],
        env=environ,
        timeout=90,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert (
        "every reserved engine was refused or could not start 5 times in a row: no such key; remedy: enroll"
        in done.stderr
    )
    assert done.stdout.count("reserved engine 0 was refused: no such key; remedy: enroll; again in") == 5


@pytest.mark.mpi
def test_ranks_that_cannot_reach_one_another_end_the_job_soon_and_its_log_says_why(tmp_path: Path) -> None:
    """Real mpirun: what the user set stays, and `self` alone reaches nobody."""
    pytest.importorskip("mpi4py")
    script, environ = job(tmp_path, Path(sys.executable))
    environ |= {"SCAVENGER_RANKS": "2", "OMPI_MCA_btl": "self", "OMPI_MCA_pml": "ob1"}
    began = time.monotonic()
    done = subprocess.run(script, env=environ, timeout=120, check=False, capture_output=True, text=True)
    assert time.monotonic() - began < 60, "on a busy machine; about 3 s on an idle one"
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("launch: 2 ranks cannot reach one another by MPI (Open MPI ")
    assert "mpirun with " in last
    assert "; remedy: " in last


def test_ranks_without_an_mpi_library_end_the_job_and_its_log_says_so(tmp_path: Path) -> None:
    version = "[ \"$1\" != --version ] || { echo 'mpirun (Open MPI) 5.0.7'; exit 0; }"
    body = "echo 'ImportError on n1: libmpi.so.40: cannot open shared object file' >&2; exit 64"
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{version}\n{body}\n")
    (tmp_path / "mpirun").chmod(0o755)
    script, environ = job(tmp_path, Path("/py"))
    environ |= {"SCAVENGER_RANKS": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(script, env=environ, timeout=90, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "launch: ranks cannot load MPI: a shared library is missing: libmpi.so.40; remedy: "
    )


@pytest.mark.parametrize(
    ("body", "code", "error_text"),
    [
        (
            "echo 'error: no such key' >&2; echo '  remedy: enroll' >&2; exit 1",
            1,
            "no such key; remedy: enroll",
        ),
        ("echo Traceback >&2; echo 'ValueError: bad shape' >&2; exit 1", 1, "ValueError: bad shape"),
        ("kill -9 $$", 137, "a rank was killed (SIGKILL)"),
    ],
)
def test_the_log_of_a_job_whose_ranks_die_ends_with_why(
    body: str, code: int, error_text: str, tmp_path: Path
) -> None:
    engine = 'echo "engine at work" >&2; exec sleep 600'
    script, environ = job(
        tmp_path, fake_python(tmp_path, f'case "$2" in trainer) {body};; *) {engine};; esac')
    )
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(script, env=environ, timeout=90, check=False, text=True, **both)  # type: ignore[call-overload]
    assert done.returncode == code
    assert done.stdout.splitlines()[-1].startswith(
        f"launch: the training job failed (status {code}): {error_text}"
    )
