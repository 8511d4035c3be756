"""The training job's reserved engines: where each one runs, its process, and when that is started again.

Owns the back-off, what an engine's end means, and that a run has such engines; does not know the ranks, MPI or the daemon. An engine is
started again whatever its end was, while the job lives: a run that was closed is opened again by the next trainer, and a refusal may be
mended from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scavenger.backoff import backoff_s
from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from scavenger.protocol.messages import reserved_name

STOP_S = 5.0
ENGINE_DRAINED, ENGINE_CANNOT_START, ENGINE_REFUSED = 0, 72, 78  # three of rollout's exit codes
REFUSALS = (ENGINE_CANNOT_START, ENGINE_REFUSED)  # it says what is to be mended, from outside
FIRST_BACKOFF_S, MOST_BACKOFF_S = 1.0, 30.0
STEADY_S = 60.0  # an engine that lived this long did not die of how it was started
MOST_REFUSALS = 5  # in a row
#: What the daemon says of a run that is closed. Its trainer may be about to open it again, so this refusal is not held against an engine.
RUN_ENDED = "has ended"
TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------- whether


def refuse_none(config: RunConfig) -> None:
    """Raises `ConfigError` for a run that would have no engine at all while no GPU is idle (I11). A try with `--local` needs none."""
    if config.reserved.workers == 0:
        raise ConfigError(
            f"reserved.workers = 0 in run {config.run.name}: while no GPU is idle nothing generates, and training stands still",
            "in run.toml, set reserved.workers = 1 or more; with reserved.window = 0.0 they sleep while harvested engines generate",
        )


# ---------------------------------------------------------------- where


@dataclass(frozen=True, slots=True)
class EngineLocation:
    """`node`: its number in the allocation. `gpus`: a value for CUDA_VISIBLE_DEVICES; "" = the job has no GPUs to choose from."""

    node: int = 0
    gpus: str = ""


def node_count(environ: Mapping[str, str]) -> int:
    return int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1")


def engine_locations(count: int, environ: Mapping[str, str], each: int = 1) -> tuple[EngineLocation, ...]:
    """Pure: engine i gets the job's i-th `each` GPUs, node by node, and the first again after the last; without GPUs, the i-th node.

    CUDA_VISIBLE_DEVICES, where Slurm set it, names the GPUs that the job has on a node; else they are numbered from 0.
    Raises `ValueError` for counts that are no numbers, `ConfigError` where a node has too few GPUs for one engine.
    """
    nodes = node_count(environ)
    gpus = int(environ.get("SLURM_GPUS_ON_NODE") or "0")
    named = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    devices = named if len(named) == gpus else [str(index) for index in range(gpus)]
    if not devices:
        return tuple(EngineLocation(index % nodes) for index in range(count))
    here = gpus // each  # engines of a node
    if count and not here:
        raise ConfigError(
            f"reserved.gpus_per_engine = {each}, and the training job has {gpus} GPUs on a node",
            "ask for more with --gpus-per-node, or lower it: an engine lies on one node",
        )
    shares = [",".join(devices[first : first + each]) for first in range(0, here * each, each)]
    return tuple(EngineLocation(index // here % nodes, shares[index % here]) for index in range(count))


def shares_gpu(workers: int, each: int, gpu: int, environ: Mapping[str, str]) -> bool:
    """Pure: whether an engine lies on this GPU of this node, by its number there. True where the environment does not say enough."""
    nodes, node = node_count(environ), int(environ.get("SLURM_NODEID") or "0")
    gpus = int(environ.get("SLURM_GPUS_ON_NODE") or "0")
    if not gpus:
        return nodes > 1 or gpu < workers * each
    here = gpus // each  # engines of a node, as `engine_locations` deals them out
    slots = [index for index in range(workers) if here and index // here % nodes == node]
    return any(gpu % gpus // each == index % here for index in slots)


def step_argv(engine: Sequence[str], location: EngineLocation, nodes: int) -> list[str]:
    """An engine as a Slurm step of its own. Slurm sets CUDA_VISIBLE_DEVICES in each step, so `env` sets it inside the step."""
    argv = ["srun", "--overlap", "--ntasks=1", "--nodes=1", "--mpi=none"]
    if nodes > 1:
        argv.append(f"--relative={location.node}")
    return [*argv, *(["env", f"CUDA_VISIBLE_DEVICES={location.gpus}"] if location.gpus else []), *engine]


# ---------------------------------------------------------------- when


@dataclass(frozen=True, slots=True)
class History:
    """What a next start depends on.

    `ends`: how often in a row the engine ended within `STEADY_S`. `refusals`: in a row, by the daemon or for want of what the engine
    needs to start; `error_text`: its last error.
    """

    ends: int = 0
    refusals: int = 0
    error_text: str = ""


def ended(history: History, code: int, lived_s: float, error_text: str) -> tuple[History, float]:
    """Pure: after an engine's end, its history and the seconds to wait before it is started again."""
    steady = lived_s >= STEADY_S
    ends = 1 if steady else history.ends + 1
    refusals = 0 if steady or code not in REFUSALS else history.refusals
    if code in REFUSALS and RUN_ENDED not in error_text:
        refusals += 1
    return History(ends, refusals, error_text), backoff_s(FIRST_BACKOFF_S, MOST_BACKOFF_S, ends)


def reason(tail: str) -> str:
    """An engine's own last words, cause and remedy, out of what it wrote to standard error."""
    lines = tail.splitlines()
    for location in range(len(lines) - 1, -1, -1):
        if lines[location].startswith("rollout: "):
            remedy = [
                line.strip() for line in lines[location + 1 : location + 2] if line.startswith("  remedy: ")
            ]
            return "; ".join([lines[location].removeprefix("rollout: "), *remedy])
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


# ---------------------------------------------------------------- the process


def die_with_parent() -> None:
    """In a child, before its program starts: SIGTERM when the launcher is gone, so that even a killed launcher leaves nothing."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ReservedEngine:
    """One reserved engine, started again with a growing wait whenever it ends. What it writes to standard error is passed on."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], number: int, gpus: int = 1) -> None:
        self._argv = list(argv)
        self._environ = dict(environ) | {"SCAVENGER_GPUS": str(gpus), "SCAVENGER_SLOT": str(number)}
        self._number = number
        self._lives, self._session = 0, ""
        self._tail = b""
        self._started_at = 0.0
        self.history = History()
        self.start_at = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def given_up(self) -> bool:
        return self.history.refusals >= MOST_REFUSALS

    @property
    def slot(self) -> str:
        """Its place in the job, whatever process fills it."""
        return str(self._number)

    @property
    def name(self) -> str:
        """What the daemon and rank 0 call its newest process."""
        return reserved_name(self.slot, self._session)

    def end(self, reason: str) -> None:
        """End its process, and say why; returns when that is gone."""
        end_all([self], reason)

    def tend(self, now: float, *, may_start: bool = True, ending: bool = False) -> None:
        """Start it when it is due and may be; look after it when it ended. `now`: monotonic seconds. `ending`: the run is over, and that
        its engines end is no news."""
        if self.process is None:
            if now >= self.start_at and may_start:
                self._start(now)
            return
        code = self.process.poll()
        self._listen(self.process)
        if code is None:
            return
        self._let_go(self.process)
        error_text = reason(self._tail.decode(errors="replace"))
        self.history, wait = ended(self.history, code, now - self._started_at, error_text)
        known = {
            ENGINE_DRAINED: "was let go",
            ENGINE_CANNOT_START: f"cannot start: {error_text}",
            ENGINE_REFUSED: f"was refused: {error_text}",
        }
        what = known.get(code, f"ended with status {code}")
        if not (ending and code in known):
            print(f"launch: reserved engine {self._number} {what}; again in {wait:g} s", flush=True)
        self.start_at = now + wait

    def forget(self) -> None:
        """After its process was ended: pass on its last words."""
        if self.process is not None:
            self._listen(self.process)
            self._let_go(self.process)

    def _start(self, now: float) -> None:
        self._session = secrets.token_hex(16)
        environ = self._environ | {
            "SCAVENGER_RESTART_COUNT": str(self._lives),
            "SCAVENGER_SESSION": self._session,
        }
        self.process = subprocess.Popen(
            self._argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        self._lives, self._tail, self._started_at = self._lives + 1, b"", now

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what there is. A process of its own that holds the pipe longer than the engine lives is not waited for."""
        assert process.stderr is not None
        while True:
            try:
                data = os.read(process.stderr.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        process.stderr.close()
        self.process = None


def end_all(engines: Sequence[ReservedEngine], reason: str) -> None:
    """End these engines' processes at once, and say why; returns when they are gone."""
    for engine in engines:
        if engine.process is not None:
            print(f"launch: reserved engine {engine.slot} is ended: {reason}", flush=True)
    end([engine.process for engine in engines if engine.process is not None])


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """TERM to each one's whole session at once; after `STOP_S`, or when all have ended, KILL to what is left of them: of a leader that
    went, a process that it started may hold the GPU yet. A leader is reaped last, so that its number names no other session meanwhile.
    """
    living = [process for process in processes if process.poll() is None]
    for process in living:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline and not all(map(_ended_unreaped, living)):
        time.sleep(0.02)  # between two looks at a condition
    for process in living:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + STOP_S
    for process in living:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _ended_unreaped(process: subprocess.Popen[bytes]) -> bool:
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
