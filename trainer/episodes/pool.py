"""Environment workers' processes: who plays which episode, and what becomes of the episodes of one that is lost.

A worker is given episodes up to `data.environment_concurrency` at once, the one with the fewest first. When it ends, whatever the cause,
another one is started in its place, and its episodes are given out again with the same name, key and seed: the environment is set up anew
and its recorded calls are answered from the ledger. An episode that was under way at `MOST_LOST` losses is given up: it may be what ends
them. Threads read the pipes; everything else is the caller's thread.

With `jobs`, workers in jobs of their own join while the pool is open (`remote`), and play beside these processes. One that leaves, or is
lost, is not replaced here: its episodes go to whoever is there, and a departure that was announced counts against none of them.

Boundary: processes and pipes; knows no group, step or gateway.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from scavenger.errors import ConfigError, RewardError
from trainer.algorithms.rewards import framed, read_frame
from trainer.episodes import remote, wire

#: Losses of its worker that one episode may see.
MOST_LOST = 5
#: Losses in a row, of workers that played nothing to its end, nor for long: then no further one is started.
MOST_VAIN = 5
#: Who has played without a break for so long shows that the environment plays: an episode may take longer than workers live.
PLAYED_S = 60.0
START_S = 600.0
ENDING_S = 10.0
ROOT = Path(__file__).resolve().parents[2]
#: What plays, of a Python that may be another one than the trainer's.
PROGRAM = ("-P", "-m", "trainer.episodes.worker")


@dataclass(slots=True)
class _Worker:
    """`process` None: it is in a job of its own. `name`: for people, and the ledger. `busy_since`: by `time.monotonic`, while it plays."""

    number: int
    process: subprocess.Popen[bytes] | None
    name: str
    ready: bool = False
    playing: dict[str, wire.Play] = field(default_factory=dict)
    busy_since: float = 0.0

    @property
    def played_s(self) -> float:
        """Seconds for which it has played without a break."""
        return time.monotonic() - self.busy_since if self.playing else 0.0


class EnvironmentPool:
    """`count` workers, each with `setup`, and those in `jobs` that join. Use as a context manager: `ready` is what they told of the
    environment.
    """

    def __init__(
        self,
        setup: wire.Setup,
        *,
        count: int = 1,
        concurrency: int = 64,
        python: Path | None = None,
        argv: Sequence[str] = PROGRAM,
        say: Callable[[str], None] = print,
        jobs: remote.PortSettings | None = None,
    ) -> None:
        self._setup, self._count, self._concurrency, self._say = setup, count, concurrency, say
        self._argv = [str(python or sys.executable), *argv]
        self._jobs = jobs
        self._port: remote.WorkerPort | None = None
        self._host = socket.gethostname()
        self._workers: dict[int, _Worker] = {}
        self._events: queue.SimpleQueue[tuple[int, remote.Event | None]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._waiting: deque[wire.Play] = deque()
        self._lost: dict[str, int] = {}  # by episode: losses that it may have caused
        self._moved: set[str] = set()  # episodes that another worker had before
        self._given_up: list[wire.Played] = []
        self._vain = 0
        #: Workers that were lost, and episodes that another worker was given for that.
        self.losses = self.resumed = 0
        self.ready = wire.Ready()

    def __enter__(self) -> Self:
        """Raises `ConfigError` where the environment cannot be loaded."""
        try:
            for _ in range(self._count):
                self._start()
            deadline = time.monotonic() + START_S
            while not any(worker.ready for worker in self._workers.values()):
                self._take(max(0.0, min(1.0, deadline - time.monotonic())))
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"data.environment = {self._setup.environment!r} was not loaded within {START_S:g} s",
                        "load its data set once before, where the network is",
                    )
            if self._jobs is not None:
                self._port = remote.WorkerPort(
                    self._jobs, self._happened, lambda: next(self._numbers), self._say
                )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        workers, self._workers = list(self._workers.values()), {}
        processes = [worker.process for worker in workers if worker.process is not None]
        for process in processes:
            _hang_up(process)
        if self._port is not None:
            self._port.close()
            self._port = None
        for process in processes:
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # ---------------------------------------------------------------- what the caller does

    def play(self, ask: wire.Play) -> None:
        """Have an episode played; `poll` gives it when it is over."""
        self._waiting.append(ask)
        self._hand_out()

    def poll(self, timeout_s: float) -> list[wire.Played]:
        """Episodes that are over; waits up to `timeout_s` for the first. Raises `RewardError` where no worker lives any more."""
        found: list[wire.Played] = []
        deadline = time.monotonic() + timeout_s
        while True:
            found += self._take(0.0 if found or self._given_up else max(0.0, deadline - time.monotonic()))
            given_up, self._given_up = self._given_up, []
            found += given_up
            if (found and self._events.empty()) or time.monotonic() >= deadline:
                return found

    @property
    def under_way(self) -> int:
        return len(self._waiting) + sum(len(worker.playing) for worker in self._workers.values())

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers.values() if worker.process is not None]

    @property
    def joined(self) -> list[str]:
        """Workers in jobs that are ready to play, by name."""
        return sorted(one.name for one in self._workers.values() if one.process is None and one.ready)

    @property
    def access(self) -> remote.WorkerAccess | None:
        """How workers in jobs join. None: none may."""
        return self._port.access if self._port is not None else None

    # ---------------------------------------------------------------- processes

    def _start(self) -> None:
        number = next(self._numbers)
        python = self._argv[0]
        try:
            process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=worker_environ(python)
            )
        except OSError as error:
            raise _no_python(python, error) from error
        worker = self._workers[number] = _Worker(number, process, self._host)
        threading.Thread(
            target=self._read, args=(number, process), name=f"environment {number}", daemon=True
        ).start()
        self._tell(worker, self._setup)

    def _happened(self, number: int, event: remote.Event) -> None:
        self._events.put((number, event))

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe, contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            while (frame := read_frame(pipe.read)) is not None:
                self._events.put((number, wire.to_trainer.decode(frame)))
        self._events.put((number, None))

    def _tell(self, worker: _Worker, message: wire.Setup | wire.Play) -> None:
        if worker.process is None:
            if self._port is not None:
                self._port.tell(worker.number, message)
            return
        assert worker.process.stdin is not None
        with contextlib.suppress(OSError):  # it ended: its reader says so
            worker.process.stdin.write(framed(msgspec.msgpack.encode(message)))
            worker.process.stdin.flush()

    def _take(self, timeout_s: float) -> list[wire.Played]:
        """One event, and what it means."""
        try:
            number, message = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
        except queue.Empty:
            return []
        if isinstance(message, remote.Joined) and self._port is not None:
            self._workers[number] = joined = _Worker(number, None, message.name)
            self._tell(joined, self._setup)
            return []
        worker = self._workers.get(number)
        if worker is None:
            return []
        played: list[wire.Played] = []
        match message:
            case None:
                self._ended(worker)
            case remote.Gone():
                self._left(worker, message)
            case wire.Ready():
                self._loaded(worker, message)
            case wire.Played() if worker.playing.pop(message.episode, None) is not None:
                self._vain = 0
                moved = message.episode in self._moved
                self._forget(message.episode)
                if (
                    moved and message.error and self._setup.effects == "external"
                ):  # what the lost worker asked, stays asked
                    message = msgspec.structs.replace(message, final=True)
                played = [msgspec.structs.replace(message, worker=worker.name)]
        self._hand_out()
        return played

    def _loaded(self, worker: _Worker, ready: wire.Ready) -> None:
        """It plays from now on. One in a job must have the very environment that those beside rank 0 have: else it may not."""
        if worker.process is not None:
            if ready.error:
                raise ConfigError(f"data.environment: {ready.error}", ready.remedy, quoted=ready.output)
            worker.ready, self.ready = True, ready
            return
        why, remedy = _other_environment(self.ready, ready)
        if why and self._port is not None:
            del self._workers[worker.number]
            self._port.refuse(worker.number, wire.Refused(why, remedy))
            self._say(f"an environment worker on {worker.name} was refused: {why}")
            if worker.ready:  # it has said so once, and otherwise
                self._lose(worker, suspect=True)
        elif not worker.ready:
            worker.ready = True
            self._say(f"an environment worker joined: {worker.name}")

    def _ended(self, worker: _Worker) -> None:
        """A process ended. It is replaced, and its episodes are played by others."""
        assert worker.process is not None
        del self._workers[worker.number]
        worker.process.kill()
        code = worker.process.wait()
        _hang_up(worker.process)
        self._vain = 0 if worker.played_s > PLAYED_S else self._vain + 1
        alone = not any(one.ready for one in self._workers.values() if one.process is not None)
        if self._vain > MOST_VAIN or (alone and not worker.ready):
            self.losses += 1
            raise RewardError(
                f"environment workers end before they play anything to its end: exit status {code}, {self._vain} times",
                "look at their words in the training job's log",
            )
        self._say(
            f"an environment worker ended (exit status {code}): another one goes on with its {len(worker.playing)} episodes"
        )
        self._lose(worker, suspect=True)
        self._start()

    def _left(self, worker: _Worker, gone: remote.Gone) -> None:
        """A worker in a job is there no more. What it played is for others at once."""
        del self._workers[worker.number]
        self._say(
            f"the environment worker on {worker.name} is gone ({gone.reason}): others go on with its {len(worker.playing)} episodes"
        )
        if worker.ready:
            self._lose(worker, suspect=gone.failed)

    def _lose(self, worker: _Worker, *, suspect: bool) -> None:
        """Its episodes wait for another worker. `suspect`: one of them may have ended it, which counts against each."""
        self.losses += 1
        for name, ask in worker.playing.items():
            self._moved.add(name)
            self._lost[name] = self._lost.get(name, 0) + suspect
            if self._lost[name] < MOST_LOST:
                self.resumed += 1
                self._waiting.append(ask)
            else:
                why = f"its environment worker was lost {self._lost[name]} times"
                self._forget(name)
                # Another try would ask tools again whose effects are outside; whether any was asked, the lost worker knew.
                final = self._setup.effects == "external"
                self._given_up.append(wire.Played(name, error=why, final=final, worker=worker.name))

    def _forget(self, episode: str) -> None:
        self._moved.discard(episode)
        self._lost.pop(episode, None)

    def _hand_out(self) -> None:
        while self._waiting:
            free = [
                worker
                for worker in self._workers.values()
                if worker.ready and len(worker.playing) < self._concurrency
            ]
            if not free:
                return
            worker = min(free, key=lambda one: (len(one.playing), one.number))
            ask = self._waiting.popleft()
            if not worker.playing:
                worker.busy_since = time.monotonic()
            worker.playing[ask.episode] = ask
            self._tell(worker, ask)


def _no_python(python: str, error: OSError) -> ConfigError:
    """Of an interpreter that cannot be started."""
    cause = (
        f"{python} cannot be started: {error.strerror}" if Path(python).exists() else f"there is no {python}"
    )
    return ConfigError(
        f"data.environment_python: {cause}",
        "name the Python of a venv with scavenger[verifiers] and the environment's package (docs/environments.md); a relative path "
        "counts from the folder of run.toml",
    )


def worker_environ(python: str) -> dict[str, str]:
    """Of a worker's process, and of no empty entry in its packages' path: the folder that the job was started in is then not among the
    packages, which a sandbox's programs may read; nor is it with `-P`. Programs beside the interpreter `python`, such as uv, are found
    after all others.
    """
    packages = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    programs = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(python).absolute().parent)])
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *packages]), "PATH": programs}


def _other_environment(ours: wire.Ready, theirs: wire.Ready) -> tuple[str, str]:
    """Why a worker's environment is not the run's, and what to do; ("", "") where it is."""
    if theirs.error:
        return f"its environment cannot be loaded: {theirs.error}"[:4000], theirs.remedy[:4000]
    if (theirs.tasks, theirs.digest) != (ours.tasks, ours.digest):
        return "its task set is another one", "have the same data set, in the same version, on all hosts"
    if theirs.version != ours.version:
        why = f"its environment is {theirs.version}, and the run's is {ours.version}"
        return why[:4000], "install the same environment's package on all hosts"
    return "", ""


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """It reads its end, and ends."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # what was not sent has no reader any more
        process.stdin.close()
