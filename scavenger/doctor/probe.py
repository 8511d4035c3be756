"""`scavenger doctor --submit`: one small job of some seconds that checks what only a compute node can show.

Owns the job's script and its folder below the state directory. Whatever happens, the job is cancelled and the folder removed.
The job asks for what an engine asks for, and runs nothing of a user's.

Boundary: the only check that submits a job.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scavenger import __version__
from scavenger.cluster.model import JobSpec
from scavenger.cluster.proxy import client
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.config import DaemonConfig
from scavenger.doctor import collect
from scavenger.doctor.facts import SLOW_IMPORTS, CommandOutput
from scavenger.errors import ClusterError
from scavenger.harvest.execute import job_script

#: Of one engine's imports: vLLM's take a minute where its files are read over a network for the first time.
IMPORT_S = 120.0
#: Whichever a run names is imported (`rollout.engines.registry`): the daemon runs engines of all of them.
ENGINES = ("reference", "vllm")
#: Of a step to start and end, on a node that is busy.
STEP_S = 60.0
#: Scavenger's own imports are tried before the engines'.
LIMIT_S = 60.0 + STEP_S + IMPORT_S * (1 + len(ENGINES))
#: For the job to start; from then on its own limit is waited for.
WAIT_S = 180.0
POLL_S = 1.0
SAID = "said"
#: Why Slurm keeps a job waiting that it would start: nothing is wrong with the site.
BUSY_REASONS = ("Resources", "Priority")
BUSY = "every node that it could have run on was busy: ask again when one of the partition's GPUs is idle"

#: Run by the engines' Python. No apostrophe: it stands between two.
_SEEN = """\
import os, sys, rollout, scavenger
os.stat(sys.argv[1])
if scavenger.__version__ != sys.argv[2]:
    sys.exit(f"{sys.executable} has release {scavenger.__version__}, and the daemon is of {sys.argv[2]}")
"""

_SCRIPT = """\
#!/bin/bash
# scavenger doctor: what does this node see? It is cancelled as soon as it has said it.
dir={dir}
[ -w "$dir" ] || exit 1
say() {{ printf '%s\\n' "$1" >>{said}; }}
exec >/dev/null 2>&1
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then exit 0; fi
say "node=${{SLURMD_NODENAME:-$(hostname)}}"
if [ -x {there} ]; then say state_dir=ok; else say "state_dir="{there}" cannot be entered"; fi
if [ -n "${{CUDA_VISIBLE_DEVICES:-}}" ]; then say gpu=ok; else say "gpu=CUDA_VISIBLE_DEVICES is empty"; fi
python() {{ timeout {import_s} {container}{python} "$@" 2>&1 </dev/null; }}
last() {{ words=$(grep -v '^srun: ' <<<"$1"); printf '%s' "${{words##*$'\\n'}}"; }}
if words=$(python -c '{seen}' "$dir" {release}); then say python=ok
    for engine in {engines}; do
        words=$(python -m rollout.engines.importable "$engine")
        case $? in 0) say "engine.$engine=ok" ;; 124) say "engine.$engine={slow} {import_s} s" ;;
        *) say "engine.$engine=$(last "$words")" ;; esac
    done
elif [ $? = 124 ]; then say "python={slow} {import_s} s"
else say "python=$(last "$words")"; fi
reach() {{ # HOST PORT: why not; a port that refuses is let through, and no process listens there
    local words
    words=$(LC_ALL=C timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>&1) && return
    case $words in *refused*) echo refused ;; *) echo "$1:$2 cannot be reached from here" ;; esac
    return 1
}}
if words=$(reach {host} {port}); then say port=ok; else say "port="{host}":{port} cannot be reached from here"; fi
for at in {controllers}; do
    if words=$(reach "${{at%:*}}" "${{at##*:}}"); then said=ok; break; else said="$at: $words"; fi
done
say "slurmctld=${{said:-ok}}"
for at in {others}; do
    if words=$(reach "${{at%:*}}" "${{at##*:}}"); then words=ok; fi
    say "reach $at=$words"
done
if words=$(timeout {step_s} srun --ntasks=1 --mpi=none --input=none true 2>&1); then say step=ok
elif [ $? = 124 ]; then say "step=srun did not start it within {step_s} s"
else say "step=${{words##*$'\\n'}}"; fi
if words=$(timeout 20 scontrol requeue "$SLURM_JOB_ID" 2>&1); then say requeue=ok; else say "requeue=${{words:-refused}}"; fi
say end=ok
sleep {limit}
"""


@dataclass(frozen=True, slots=True)
class ProbePlace:
    """Of the test job. `folder`: where it can write, and begins; `said`: where it says what it sees, which `read` gives; `there`: where
    engines look for the daemon. `state`: (state, reason, restarts); the state is "" when Slurm cannot say."""

    folder: Path
    said: Path
    there: Path
    read: Callable[[], str]
    state: Callable[[int], tuple[str, str, int]]
    name: str = "scv-doctor"
    output: str = "/dev/null"
    workdir: str = os.sep


def script(
    place: ProbePlace,
    python: str,
    host: str,
    port: int,
    container: str = "",
    engines: Sequence[str] = ENGINES,
    controllers: Sequence[str] = (),
    others: Sequence[str] = (),
) -> str:
    """Pure. The batch script of the test job. `container`: `harvest.container`, in which the engines' Python is looked for.

    `engines`: what these need is imported there, each in a process of its own. `controllers`: HOST:PORT of slurmctld and of its backups,
    of which one must be reached; `others`: of what else may be.
    """
    quote = shlex.quote
    # in a step, as the engine: the container may be options of srun
    step = (
        f"srun --ntasks=1 --mpi=none --input=none {job_script.shell_words(container)} " if container else ""
    )
    return _SCRIPT.format(
        dir=quote(str(place.folder)),
        said=quote(str(place.said)),
        there=quote(str(place.there)),
        container=step,
        python=quote(python),
        host=quote(host),
        port=int(port),
        seen=_SEEN,
        release=quote(__version__),
        engines=" ".join(map(quote, engines)),
        import_s=int(IMPORT_S),
        slow=SLOW_IMPORTS,
        step_s=int(STEP_S),
        controllers=" ".join(map(quote, controllers)),
        others=" ".join(map(quote, others)),
        limit=int(LIMIT_S),
    )


def job(config: DaemonConfig, text: str, place: ProbePlace) -> JobSpec:
    """Pure. It asks for what an engine of one GPU asks for."""
    h = config.harvest
    return JobSpec(
        name=place.name,
        output=place.output,
        comment="scavenger doctor",
        partition=h.partition,
        script=text,
        gpus=1,
        gpu_type=h.gpu_type,
        cpus_per_task=h.cpus_per_engine,
        memory_mb=h.memory_mb_per_engine,
        time_s=LIMIT_S,
        workdir=place.workdir,
        account=job_script.of_owner(h.account, ""),
        qos=h.qos,
        wckey=job_script.of_owner(h.wckey, ""),
        constraint=h.constraint,
    )


def run(
    config: DaemonConfig,
    env: Mapping[str, str] | None = None,
    wait_s: float = WAIT_S,
    say: Callable[[str], None] = lambda _text: None,
    engines: Sequence[str] = ENGINES,
    controllers: Sequence[str] = (),
    others: Sequence[str] = (),
) -> CommandOutput:
    """Submit the job, wait for its result, and remove everything again. A refusal by the site is in the answer, not raised.

    `engines`: those whose imports are tried. `say` is called with a line on the submitted job and how long it is waited for.
    """
    cluster = client.over(config, SlurmCluster(env, config.cluster.command_timeout_s))
    engines_user = client.engines_user_of(config)
    job_id = 0
    with contextlib.ExitStack() as stack:
        try:
            place = (
                stack.enter_context(_own_place(config, env))
                if engines_user is None
                else _place_of(engines_user, config, cluster)
            )
        except OSError as error:
            return CommandOutput(error=f"the state directory cannot be written: {error}")
        try:
            h = config.harvest
            python = h.python or sys.executable
            host, port = stack.enter_context(_listening(config))
            text = script(place, python, host, port, h.container, engines, controllers, others)
            job_id = cluster.submit(job(config, text, place))
            say(
                f"job {job_id} was submitted to {config.harvest.partition}; its start is waited for, {wait_s:g} s at most, "
                f"then its word, {LIMIT_S:g} s at most"
            )
            return _wait(place, job_id, wait_s)
        except (ClusterError, OSError) as error:
            return CommandOutput(error=f"the test job could not be run: {error}")
        finally:
            # The answer stands; a job that stays ends by its own limit.
            with contextlib.suppress(ClusterError):
                if job_id:
                    cluster.cancel((job_id,))


@contextlib.contextmanager
def _own_place(config: DaemonConfig, env: Mapping[str, str] | None) -> Iterator[ProbePlace]:
    """A folder below the state directory, which is removed again. Raises `OSError`."""
    state_dir = config.daemon.state_dir.resolve()
    folder, new = state_dir / f"doctor-{secrets.token_hex(4)}", not state_dir.exists()
    folder.mkdir(mode=0o700, parents=True)
    said = folder / SAID

    def read() -> str:
        return said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""

    try:
        yield ProbePlace(folder, said, state_dir, read, lambda job_id: _state(job_id, env))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):  # another process put a file there meanwhile: it stays
                state_dir.rmdir()


def _place_of(
    engines_user: client.EnginesUser, config: DaemonConfig, cluster: SlurmCluster | client.ProxyCluster
) -> ProbePlace:
    """In the folder of the engines' user, whose process gives the job's log; the daemon has that removed with others."""
    home, public_dir = config.engines_home, config.daemon.public_dir
    assert public_dir is not None  # by the configuration
    name = f"scv-doctor-{secrets.token_hex(4)}"
    log = job_script.log_path(home, name)

    def read() -> str:
        return engines_user.end_of_log(name).decode("utf-8", "replace")

    def state(job_id: int) -> tuple[str, str, int]:
        with contextlib.suppress(ClusterError):
            for one in cluster.jobs():
                if one.job_id == job_id:
                    return one.state, one.reason, one.restart_count
        return "", "", 0

    return ProbePlace(home, log, public_dir.resolve(), read, state, name, str(log), str(home))


@contextlib.contextmanager
def _listening(config: DaemonConfig) -> Iterator[tuple[str, int]]:
    """A listener for the job to reach: the daemon itself if it already has `port`, else a socket of ours."""
    d = config.daemon
    host = d.advertise or (socket.gethostname() if d.listen == "0.0.0.0" else d.listen)
    with socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            ours.bind((d.listen, d.port))
            ours.listen(1)
        except OSError:
            if not d.port:
                raise
        yield host, d.port or ours.getsockname()[1]


def _wait(place: ProbePlace, job_id: int, wait_s: float) -> CommandOutput:
    deadline = time.monotonic() + wait_s
    text = ""
    while time.monotonic() < deadline:
        began, text = not text, place.read()
        if began and text:
            deadline = max(deadline, time.monotonic() + LIMIT_S)
        state, reason, restarts = place.state(job_id)
        if "requeue=" in text and ("requeue=ok" not in text or restarts):
            return CommandOutput(text)
        if restarts:  # it was put back before it could say that it was
            return CommandOutput(text + "requeue=ok\n")
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", ""):
            return CommandOutput(text) if "node=" in text else CommandOutput(error=_silent(job_id, state))
        time.sleep(POLL_S)  # between two polls of the job: Slurm sends no event
    if "node=" in text:
        return CommandOutput(text)
    was = f"{state or 'not to be asked for'} ({reason or 'no reason given'})"
    return CommandOutput(
        error=f"job {job_id} was {was} for {wait_s:g} s and said nothing",
        remedy=BUSY if reason in BUSY_REASONS else "",
    )


def _silent(job_id: int, state: str) -> str:
    return f"job {job_id} is {state} and said nothing: its node does not see the state directory, or could not start it"


def _state(job_id: int, env: Mapping[str, str] | None) -> tuple[str, str, int]:
    """As `ProbePlace.state`, asked by this user."""
    argv = ["squeue", "-h", "-t", "all", "-j", str(job_id), "-O", "State:32,Reason:64,RestartCnt:16"]
    answer = collect.ask(argv, collect.environment(env), collect.DEADLINE_S)
    words = (answer.text[:32].strip(), answer.text[32:96].strip(), answer.text[96:112].strip())
    return words[0], words[1], int(words[2]) if words[2].isdigit() else 0
