"""The training job's first process: `python -m trainer.launch RUN.toml [trainer arguments]`, started by `scripts/train.sbatch`.

Owns the job's processes: the MPI ranks, and beside them the reserved engines, each a step of its own (`srun --overlap`) under Slurm
and a sibling process elsewhere (`trainer.reserved`). A rank never forks an engine. Knows no torch and no MPI: it builds argv and waits.

Environment, all optional:
    SCAVENGER_PYTHON   interpreter of ranks and engines; default this one
    SCAVENGER_RANKS    MPI ranks; default SLURM_NTASKS, else 1
    SCAVENGER_MPI      srun | mpirun | auto (default): srun with the first of `--mpi=pmix` and `--mpi=pmi2` under which a probe sees
                       the whole world, else mpirun
    SLURM_MPI_TYPE     Slurm's own: the only type that srun is then tried with
    SCAVENGER_BACKEND  "local": not under Slurm, whatever SLURM_* says
What the MPI library is told is what a tiny world of as many ranks was seen to need (`trainer.mpi_settings`); a
variable that the user set stays. A job that fails says why in the last line of its log.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scavenger import config as configs
from scavenger.config import RunConfig
from scavenger.errors import ConfigError, Refused, ScavengerError
from scavenger.protocol import keys
from trainer import embedded, engine_control, failure, mpi_settings, reach, reserved
from trainer.arguments import layers_among
from trainer.embedded import EmbeddedDaemon
from trainer.loop.ending import SIGTERM_EXIT
from trainer.model.mesh import divide
from trainer.mpi_settings import GiveUp, HostFault, Library, MpiChoice, Trial
from trainer.reserved import EngineLocation, ReservedEngine, die_with_parent

POLL_S = 0.2
#: Signals that tell the job to end.
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: Of a tiny world: MPI's start and a byte each way; and of its Python's start as well, on a slow file system.
WORLD_S, TRIAL_S = 10.0, 60.0
#: Where a host of the job answers no connection: it meets soon, or not at all.
SILENT_TRIAL_S = 20.0
VERSION_S = 20.0
#: In place of the status of a launcher that could not be started, as shells have it.
NOT_STARTED = 127
LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What to start. `engine` is one reserved engine's argv; one runs at each of `engine_locations`, on
    `engine_gpus` GPUs, on `nodes` nodes."""

    python: str
    ranks: int
    slurm: bool
    launcher: str
    trainer: tuple[str, ...]
    engine: tuple[str, ...]
    engine_locations: tuple[EngineLocation, ...]
    nodes: int
    grace_s: float = 0.0  # what the ranks may take to write a checkpoint when the job is told to end
    daemon: EmbeddedDaemon | None = None  # the run's own, not started yet
    engine_gpus: int = 1


def plan(
    config: RunConfig, run_toml: Path, arguments: Sequence[str], environ: Mapping[str, str]
) -> LaunchPlan:
    """Reads nothing but the embedded daemon's configuration. Raises `ConfigError` for what cannot be used."""
    reserved.refuse_none(config)
    python = environ.get("SCAVENGER_PYTHON") or sys.executable
    slurm = "SLURM_JOB_ID" in environ and environ.get("SCAVENGER_BACKEND") != "local"
    text = environ.get("SCAVENGER_RANKS") or (environ.get("SLURM_NTASKS") if slurm else None) or "1"
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f"SCAVENGER_RANKS = {text!r} is not a number of ranks", "set a positive number, or unset it"
        )
    divide(int(text), config.trainer)
    launcher = environ.get("SCAVENGER_MPI", "auto")
    if launcher not in ("auto", "srun", "mpirun"):
        raise ConfigError(f"SCAVENGER_MPI = {launcher!r}", "use srun, mpirun or auto")
    key = config.run.key or keys.key_path_for(config.run.state_dir)
    engine = (
        python,
        "-m",
        "rollout",
        "--kind",
        "reserved",
        "--run",
        config.run.name,
        "--engine",
        config.engine.name,
        "--state-dir",
        str(config.run.state_dir),
        "--key",
        str(key),
    )
    trainer = (python, "-m", "trainer", str(run_toml), *arguments)
    workers, each = config.reserved.workers, config.reserved.gpus_per_engine
    where, nodes = _engine_locations(workers, environ, each) if slurm else ((EngineLocation(),) * workers, 1)
    own = None
    if config.daemon.embedded:
        embedded.check(config)
        assert config.daemon.config is not None
        log = config.run.out_dir / "daemon.log"
        own = EmbeddedDaemon(python, config.daemon.config, config.run.state_dir, environ, log)
    return LaunchPlan(
        python,
        int(text),
        slurm,
        launcher,
        trainer,
        engine,
        where,
        nodes,
        config.checkpoint.grace_s,
        own,
        each,
    )


def _engine_locations(
    workers: int, environ: Mapping[str, str], each: int
) -> tuple[tuple[EngineLocation, ...], int]:
    try:
        return reserved.engine_locations(workers, environ, each), reserved.node_count(environ)
    except ValueError as error:
        raise ConfigError(
            f"Slurm's variables do not say what the job has: {error}",
            "set SCAVENGER_BACKEND=local outside Slurm",
        ) from error


def environment(environ: Mapping[str, str], *, root: bool) -> dict[str, str]:
    """The job's environment with what the processes need and the user did not set."""
    if environ.get("SCAVENGER_BACKEND") == "local":
        environ = {
            name: value for name, value in environ.items() if not name.startswith("SLURM")
        }  # an outer job is not ours
    slurm = {"SCAVENGER_JOB_ID": environ["SLURM_JOB_ID"]} if "SLURM_JOB_ID" in environ else {}
    return (
        mpi_settings.OVERSUBSCRIBE
        | (AS_ROOT if root else {})
        | {"PYTHONUNBUFFERED": "1"}
        | slurm
        | dict(environ)
    )


def srun_ranks(made: LaunchPlan, launcher: str, argv: Sequence[str]) -> list[str]:
    return [*launcher.split(), "--overlap", f"--ntasks={made.ranks}", "--kill-on-bad-exit=1", *argv]


def mpirun_ranks(made: LaunchPlan, argv: Sequence[str]) -> list[str]:
    """The mpirun beside the interpreter, which came with its MPI library, else the one on PATH.

    Raises `ConfigError` when none is installed.
    """
    beside = Path(made.python).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ConfigError(
            "no mpirun on PATH",
            "install the MPI that mpi4py was built for (openmpi-bin), or `pip install 'scavenger[mpi]'`",
        )
    return [found, "-n", str(made.ranks), *argv]


@dataclass(frozen=True, slots=True)
class RankStart:
    """How the ranks are started here. `environ`: the job's, and what MPI was seen to need.

    `reason`: for the log.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    reason: str


def rank_start(made: LaunchPlan, environ: Mapping[str, str]) -> RankStart:
    """Tries launchers and settings with a tiny world of as many ranks.

    Raises `ConfigError` where none meets.
    """
    if not made.slurm and made.launcher != "srun" and made.ranks == 1:
        return RankStart(made.trainer, environ, "one rank needs no launcher")
    found = _library(made, environ)
    launchers, trials = _launchers(made, found, environ), list[Trial]()
    silent = _silent_hosts(environ) if made.slurm else {}
    while True:
        chosen = mpi_settings.decide(found, launchers, made.ranks, trials, silent)
        if isinstance(chosen, GiveUp):
            raise ConfigError(chosen.reason, chosen.remedy)
        whole = dict(chosen.settings.environ) | dict(environ)
        if isinstance(chosen, MpiChoice):
            return RankStart(tuple(_launched(chosen.launcher, made, made.trainer)), whole, chosen.reason)
        probe = [made.python, "-m", "trainer.world_probe", str(made.ranks), f"{WORLD_S:g}"]
        limit_s = SILENT_TRIAL_S if silent else TRIAL_S
        print(f"launch: trying {made.ranks} ranks under {chosen.launcher}", flush=True)
        code, error_text = _tried(_launched(chosen.launcher, made, probe), whole, limit_s)
        trials.append(Trial(chosen.launcher, chosen.settings, code, error_text))


def _silent_hosts(environ: Mapping[str, str]) -> dict[str, HostFault]:
    return reach.silent_hosts(_other_hosts(environ), reach.tried_ports(reach.system_ports(), random.Random()))


def _other_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The job's hosts but this one; none where Slurm does not say."""
    nodes, here = environ.get("SLURM_JOB_NODELIST", ""), environ.get("SLURMD_NODENAME", "")
    if environ.get("SLURM_JOB_NUM_NODES", "1") == "1" or not nodes or not here:
        return ()
    named = _output(["scontrol", "show", "hostnames", nodes], environ).split()
    return tuple(name for name in named if name != here)


def _launchers(made: LaunchPlan, found: Library, environ: Mapping[str, str]) -> tuple[str, ...]:
    """In the order in which they are preferred.

    Raises `ConfigError` where there is none.
    """
    sruns: tuple[str, ...] = ()
    if made.launcher == "srun" or (made.slurm and made.launcher == "auto"):
        listed = "" if environ.get("SLURM_MPI_TYPE") else _output(["srun", "--mpi=list"], environ)
        sruns = mpi_settings.srun_launchers(found, listed, environ.get("SLURM_MPI_TYPE", ""))
    if made.launcher == "srun":
        if not sruns:
            raise ConfigError(
                f"srun offers neither pmix nor pmi2: `srun --mpi=list` says {listed.strip()!r}",
                "set SCAVENGER_MPI=mpirun, or install Slurm's PMIx plugin",
            )
        return sruns
    try:
        mpirun_ranks(made, ())
    except ConfigError:
        if sruns:
            return sruns
        raise
    return (*sruns, "mpirun")


def _launched(launcher: str, made: LaunchPlan, argv: Sequence[str]) -> list[str]:
    return srun_ranks(made, launcher, argv) if launcher.startswith("srun ") else mpirun_ranks(made, argv)


def _library(made: LaunchPlan, environ: Mapping[str, str]) -> Library:
    """By its launcher's word; where there is none, by the library that mpi4py finds."""
    try:
        argv = [mpirun_ranks(made, ())[0], "--version"]
    except ConfigError:
        argv = [made.python, "-c", LIBRARY]
    return mpi_settings.library(_output(argv, environ))


def _output(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a command prints, older `srun --mpi=list` to stderr; "" where it cannot run, or does not end in time."""
    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).decode(errors="replace")


def _tried(argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """Run it: its exit status, None where it did not end in time, and in one line why it failed.

    Nothing of it is left.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            return NOT_STARTED, f"{argv[0]}: {error.strerror}"
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            reserved.end([process])
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code == 0:
        return 0, ""
    late = f"did not end within {limit_s:g} s: " if code is None else ""
    return code, late + failure.cause(text, code or 0).partition("; remedy: ")[
        0
    ]  # of all trials there is one remedy


def engine_argv(made: LaunchPlan, number: int) -> list[str]:
    return (
        reserved.step_argv(made.engine, made.engine_locations[number], made.nodes)
        if made.slurm
        else list(made.engine)
    )


class _Ended(Exception):
    """A signal asked the job to end."""


def _raise_ended(number: int, frame: object) -> None:
    raise _Ended(signal.Signals(number).name)


def run(made: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Start everything, wait for the ranks, end the engines. Returns the ranks' status; the last line says why it is not 0.

    Raises `Refused` when no reserved engine gets in, `ConfigError` when the ranks cannot reach one another. However it
    ends, the run is not closed here: the next start of the job goes on.
    """
    error_text: list[str] = []
    code = _run(made, environ, error_text)
    for line in error_text:
        print(f"launch: the training job failed (status {code}): {line}", file=sys.stderr, flush=True)
    if code == 0:
        print("launch: the run is finished; its engines have ended", flush=True)
    return code


def _run(made: LaunchPlan, environ: Mapping[str, str], error_text: list[str]) -> int:
    """As `run`; why the ranks failed comes last, after all else has ended, and so goes to `error_text`."""
    for number in ENDS:
        signal.signal(number, _raise_ended)
    engines = [
        ReservedEngine(engine_argv(made, number), environ, number, made.engine_gpus)
        for number in range(len(made.engine_locations))
    ]
    ranks: subprocess.Popen[bytes] | None = None
    control = engine_control.Launcher()
    environ = dict(environ) | {engine_control.VARIABLE: str(control.folder)}
    if (
        not sys.stdout.isatty()
    ):  # rich's variable: no bar in a log, also where ranks get a terminal (mpirun of Open MPI 5)
        environ["TTY_COMPATIBLE"] = "0"
    acted = 0  # number of rank 0's last word that was acted upon
    try:
        if made.daemon is not None:
            made.daemon.start()
        start = rank_start(made, environ)
        print(f"launch: {start.reason}", flush=True)
        ranks = subprocess.Popen(
            start.argv,
            env=dict(start.environ),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert ranks.stderr is not None
        said = failure.StderrTail(ranks.stderr)
        while ranks.poll() is None:
            acted = _tend(engines, control, acted)
            _check(engines)
            if made.daemon is not None:
                made.daemon.tend(time.monotonic())
            time.sleep(POLL_S)  # between two looks at the processes
        code = ranks.returncode if ranks.returncode >= 0 else 128 - ranks.returncode
        if code not in (0, SIGTERM_EXIT):
            error_text.append(failure.cause(said.text(), ranks.returncode))
        return code
    except _Ended as ended:
        print(f"launch: {ended}: the job ends; the run can be resumed", flush=True)
        if ranks is not None:
            _let_save(ranks, made.grace_s)
        return 128 + (signal.SIGINT if str(ended) == "SIGINT" else signal.SIGTERM)
    finally:
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
        reserved.end(
            [process for process in (ranks, *(engine.process for engine in engines)) if process is not None]
        )
        for engine in engines:
            engine.forget()
        control.close()
        if made.daemon is not None:
            made.daemon.stop()


def _tend(engines: Sequence[ReservedEngine], control: engine_control.Launcher, acted: int) -> int:
    """Do what rank 0 last said of the engines, look after each, and say which have a process. Returns the number of that word.

    None is started while rank 0 trains, or has published nothing yet: what an engine takes as it starts is what ranks need.
    """
    wanted = control.wanted()
    if wanted.number != acted:
        reserved.end_all([engine for engine in engines if engine.name in wanted.end], wanted.reason)
    for engine in engines:
        engine.tend(time.monotonic(), may_start=wanted.awake, ending=wanted.ending)
    slots, running = (
        (engine.slot for engine in engines),
        (engine.name for engine in engines if engine.process is not None),
    )
    control.say(engine_control.Present(wanted.number, tuple(slots), tuple(running)))
    return wanted.number


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


def _check(engines: Sequence[ReservedEngine]) -> None:
    """Raises `Refused` when every engine was refused too often: none would wake when harvested engines go."""
    if engines and all(engine.given_up for engine in engines):
        often, error_text = reserved.MOST_REFUSALS, engines[0].history.error_text
        raise Refused(
            f"every reserved engine was refused or could not start {often} times in a row: {error_text}"
        )


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print("usage: python -m trainer.launch RUN.toml [trainer arguments]", file=sys.stderr)
        return 2
    run_toml = Path(argv[0]).resolve()
    try:
        environ = environment(os.environ, root=os.geteuid() == 0)
        config = configs.read_run(run_toml, *layers_among(argv[1:]))
        return run(plan(config, run_toml, argv[1:], environ), environ)
    except ScavengerError as error:
        remedy = f"; remedy: {error.remedy}" if error.remedy else ""
        print(f"launch: {error.log_text}{remedy}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
