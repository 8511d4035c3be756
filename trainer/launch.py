"""The training job's first process: `python -m trainer.launch RUN.toml [trainer arguments]`, started by `scripts/train.sbatch`.

Owns the job's processes: the MPI ranks, and beside them the reserved engines, each a step of its own (`srun --overlap`) under Slurm
and a sibling process elsewhere. A rank never forks an engine. Knows no torch and no MPI: it builds argv and waits.

Environment, all optional:
    SCAVENGER_PYTHON   interpreter of ranks and engines; default this one
    SCAVENGER_RANKS    MPI ranks; default SLURM_NTASKS, else 1
    SCAVENGER_MPI      srun | mpirun | auto (default): `srun --mpi=pmix` where a probe sees the whole world, else mpirun
    SCAVENGER_BACKEND  "local": not under Slurm, whatever SLURM_* says
MPI carries small control frames only, so Open MPI is told to use TCP, not to bind and to oversubscribe, unless its variables are set.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scavenger import config as configs
from scavenger import keys
from scavenger.config import RunConfig
from scavenger.errors import ConfigError, ScavengerError

POLL_S = 0.2
STOP_S = 5.0
ENGINE_DRAINED, ENGINE_REFUSED = 0, 78  # rollout's exit codes after which an engine is not started again
FIRST_BACKOFF_S, MOST_BACKOFF_S = 1.0, 30.0
PROBE = "import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.Get_size() != int(sys.argv[1]))"
OPEN_MPI = {
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start. `engine` is one reserved engine's argv; `workers` of them run."""

    python: str
    ranks: int
    slurm: bool
    launcher: str
    trainer: tuple[str, ...]
    engine: tuple[str, ...]
    workers: int


def plan(config: RunConfig, run_toml: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Pure. Raises `ConfigError` for variables that cannot be used."""
    python = environ.get("SCAVENGER_PYTHON") or sys.executable
    slurm = "SLURM_JOB_ID" in environ and environ.get("SCAVENGER_BACKEND") != "local"
    text = environ.get("SCAVENGER_RANKS") or (environ.get("SLURM_NTASKS") if slurm else None) or "1"
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"SCAVENGER_RANKS = {text!r} is not a number of ranks", "set a positive number, or unset it")
    launcher = environ.get("SCAVENGER_MPI", "auto")
    if launcher not in ("auto", "srun", "mpirun"):
        raise ConfigError(f"SCAVENGER_MPI = {launcher!r}", "use srun, mpirun or auto")
    key = config.run.key or keys.owner_key_path(config.run.state_dir)
    engine = (
        python, "-m", "rollout", "--kind", "reserved", "--run", config.run.name, "--engine", config.engine.name,
        "--state-dir", str(config.run.state_dir), "--key", str(key),
    )  # fmt: skip
    trainer = (python, "-m", "trainer", str(run_toml), *arguments)
    return Plan(python, int(text), slurm, launcher, trainer, engine, config.reserved.workers)


def environment(environ: Mapping[str, str], *, root: bool) -> dict[str, str]:
    """The job's environment with what the processes need and the user did not set."""
    if environ.get("SCAVENGER_BACKEND") == "local":
        environ = {name: value for name, value in environ.items() if not name.startswith("SLURM")}  # an outer job is not ours
    slurm = {"SCAVENGER_JOB_ID": environ["SLURM_JOB_ID"]} if "SLURM_JOB_ID" in environ else {}
    return OPEN_MPI | (AS_ROOT if root else {}) | {"PYTHONUNBUFFERED": "1"} | slurm | dict(environ)


def srun_ranks(made: Plan, argv: Sequence[str]) -> list[str]:
    return ["srun", "--mpi=pmix", "--overlap", f"--ntasks={made.ranks}", "--kill-on-bad-exit=1", *argv]


def mpirun_ranks(made: Plan, argv: Sequence[str]) -> list[str]:
    """Raises `ConfigError` when no mpirun is installed."""
    beside = Path(made.python).with_name("mpirun")
    found = shutil.which("mpirun") or (str(beside) if beside.exists() else None)
    if found is None:
        raise ConfigError("no mpirun on PATH", "install the MPI that mpi4py was built for (openmpi-bin), or `pip install .[mpi]`")
    return [found, "-n", str(made.ranks), *argv]


def rank_argv(made: Plan, environ: Mapping[str, str]) -> list[str]:
    """How the ranks are started here. Under Slurm, "auto" tries `srun --mpi=pmix` with a program that only counts ranks."""
    if not made.slurm and made.launcher != "srun":
        return list(made.trainer) if made.ranks == 1 else mpirun_ranks(made, made.trainer)
    if made.launcher == "mpirun":
        return mpirun_ranks(made, made.trainer)
    probe = srun_ranks(made, [made.python, "-c", PROBE, str(made.ranks)])
    if made.launcher == "srun" or _succeeds(probe, environ):
        return srun_ranks(made, made.trainer)
    print(f"launch: `srun --mpi=pmix` does not make a world of {made.ranks} here; using mpirun", flush=True)
    return mpirun_ranks(made, made.trainer)


def _succeeds(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    try:
        probe = subprocess.run(argv, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


def engine_argv(made: Plan) -> list[str]:
    step = ["srun", "--overlap", "--ntasks=1", "--nodes=1", "--mpi=none"] if made.slurm else []
    return [*step, *made.engine]


class Engine:
    """One reserved engine, started again (with a growing wait) when it dies, until it is drained or refused."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], number: int) -> None:
        self._argv = list(argv)
        self._environ = dict(environ) | {"SCAVENGER_GPUS": "1"}
        self._number = number
        self._lives = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0

    def tend(self, now: float) -> None:
        """Start it when it is due; look after it when it ended. `now`: monotonic seconds."""
        if self._process is None:
            if now >= self._start_at:
                environ = self._environ | {"SCAVENGER_RESTART_COUNT": str(self._lives)}
                self._process = subprocess.Popen(self._argv, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
                self._lives += 1
            return
        code = self._process.poll()
        if code is None:
            return
        self._process = None
        if code in (ENGINE_DRAINED, ENGINE_REFUSED):
            self._start_at = float("inf")
            return
        print(f"launch: reserved engine {self._number} ended with status {code}; again in {self._backoff_s:g} s", flush=True)
        self._start_at, self._backoff_s = now + self._backoff_s, min(2 * self._backoff_s, MOST_BACKOFF_S)

    def stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    """TERM to the whole session, KILL after `STOP_S`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue


class _Ended(Exception):
    """A signal asked the job to end."""


def _raise_ended(number: int, frame: object) -> None:
    raise _Ended(signal.Signals(number).name)


def run(made: Plan, environ: Mapping[str, str]) -> int:
    """Start everything, wait for the ranks, end the engines. Returns the ranks' exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_ended)
    engines = [Engine(engine_argv(made), environ, number) for number in range(made.workers)]
    ranks: subprocess.Popen[bytes] | None = None
    try:
        ranks = subprocess.Popen(rank_argv(made, environ), env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True)
        while ranks.poll() is None:
            for engine in engines:
                engine.tend(time.monotonic())
            time.sleep(POLL_S)
        return ranks.returncode
    except _Ended as ended:
        print(f"launch: {ended}: the job ends", flush=True)
        return 128 + signal.Signals[str(ended)]
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if ranks is not None:
            _end(ranks)
        for engine in engines:
            engine.stop()


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print("usage: python -m trainer.launch RUN.toml [trainer arguments]", file=sys.stderr)
        return 2
    run_toml = Path(argv[0]).resolve()
    try:
        environ = environment(os.environ, root=os.geteuid() == 0)
        return run(plan(configs.read_run(run_toml), run_toml, argv[1:], environ), environ)
    except ScavengerError as error:
        print(f"launch: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
