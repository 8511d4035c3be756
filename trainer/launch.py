"""The training job's first process: `python -m trainer.launch RUN.toml [trainer arguments]`, started by `scripts/train.sbatch`.

Owns the job's processes: the MPI ranks, and beside them the reserved engines, each a step of its own (`srun --overlap`) under Slurm
and a sibling process elsewhere (`trainer.reserved`). A rank never forks an engine. Knows no torch and no MPI: it builds argv and waits.

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
from scavenger.errors import ConfigError, Refused, ScavengerError
from trainer import embedded, reserved
from trainer.embedded import EmbeddedDaemon
from trainer.reserved import Engine, Place, die_with_parent

POLL_S = 0.2
#: Signals that tell the job to end.
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PROBE = "import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.Get_size() != int(sys.argv[1]))"
OPEN_MPI = {
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start. `engine` is one reserved engine's argv; one runs at each of `places`, on `engine_gpus` GPUs, on `nodes` nodes."""

    python: str
    ranks: int
    slurm: bool
    launcher: str
    trainer: tuple[str, ...]
    engine: tuple[str, ...]
    places: tuple[Place, ...]
    nodes: int
    grace_s: float = 0.0  # what the ranks may take to write a checkpoint when the job is told to end
    daemon: EmbeddedDaemon | None = None  # the run's own, not started yet
    engine_gpus: int = 1


def plan(config: RunConfig, run_toml: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Reads nothing but the embedded daemon's configuration. Raises `ConfigError` for what cannot be used."""
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
    workers, each = config.reserved.workers, config.reserved.gpus_per_engine
    where, nodes = _places(workers, environ, each) if slurm else ((Place(),) * workers, 1)
    own = None
    if config.daemon.embedded:
        embedded.check(config)
        assert config.daemon.config is not None
        log = config.run.out_dir / "daemon.log"
        own = EmbeddedDaemon(python, config.daemon.config, config.run.state_dir, environ, log)
    return Plan(python, int(text), slurm, launcher, trainer, engine, where, nodes, config.checkpoint.grace_s, own, each)


def _places(workers: int, environ: Mapping[str, str], each: int) -> tuple[tuple[Place, ...], int]:
    try:
        return reserved.places(workers, environ, each), reserved.node_count(environ)
    except ValueError as error:
        raise ConfigError(f"Slurm's variables do not say what the job has: {error}", "set SCAVENGER_BACKEND=local outside Slurm") from error


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


def engine_argv(made: Plan, number: int) -> list[str]:
    return reserved.step_argv(made.engine, made.places[number], made.nodes) if made.slurm else list(made.engine)


class _Ended(Exception):
    """A signal asked the job to end."""


def _raise_ended(number: int, frame: object) -> None:
    raise _Ended(signal.Signals(number).name)


def run(made: Plan, environ: Mapping[str, str]) -> int:
    """Start everything, wait for the ranks, end the engines. Returns the ranks' exit status.

    Raises `Refused` when no reserved engine gets in. However it ends, the run is not closed here: whoever starts the job again goes on.
    """
    for number in ENDS:
        signal.signal(number, _raise_ended)
    engines = [Engine(engine_argv(made, number), environ, number, made.engine_gpus) for number in range(len(made.places))]
    ranks: subprocess.Popen[bytes] | None = None
    try:
        if made.daemon is not None:
            made.daemon.start()
        ranks = subprocess.Popen(
            rank_argv(made, environ), env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
        )
        while ranks.poll() is None:
            for engine in engines:
                engine.tend(time.monotonic())
            _check(engines)
            if made.daemon is not None:
                made.daemon.tend(time.monotonic())
            time.sleep(POLL_S)  # between two looks at the processes
        return ranks.returncode
    except _Ended as ended:
        print(f"launch: {ended}: the job ends; the run can be resumed", flush=True)
        if ranks is not None:
            _let_save(ranks, made.grace_s)
        return 128 + (signal.SIGINT if str(ended) == "SIGINT" else signal.SIGTERM)
    finally:
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
        reserved.end([process for process in (ranks, *(engine.process for engine in engines)) if process is not None])
        for engine in engines:
            engine.forget()
        if made.daemon is not None:
            made.daemon.stop()


def _let_save(ranks: subprocess.Popen[bytes], grace_s: float) -> None:
    """Have rank 0 write a checkpoint, and wait until the ranks are gone, `grace_s` at most, or until the job is told once more to end.

    SIGUSR1, because mpirun passes it on and goes on; a SIGTERM it would follow up with SIGKILL after a second.
    """
    again: list[int] = []
    for number in ENDS:
        signal.signal(number, lambda number, frame: again.append(number))
    ranks.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + grace_s
    while ranks.poll() is None and not again and time.monotonic() < deadline:
        time.sleep(POLL_S)  # between two looks at the ranks


def _check(engines: Sequence[Engine]) -> None:
    """Raises `Refused` when every engine was refused too often: nobody would wake when harvested engines go."""
    if engines and all(engine.given_up for engine in engines):
        often, words = reserved.MOST_REFUSALS, engines[0].history.words
        raise Refused(f"every reserved engine was refused or could not start {often} times in a row: {words}")


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
