"""Environment workers' processes: who plays which episode, and what becomes of the episodes of one that is lost.

A worker is given episodes up to `data.environment_concurrency` at once, the one with the fewest first. When it ends, whatever the cause,
another one is started in its place, and its episodes are given out again with the same name, key and seed: the environment is set up anew
and its recorded calls are answered from the ledger. An episode that was under way at `MOST_LOST` losses is given up: it may be what ends
them. Threads read the pipes; everything else is the caller's thread.

Boundary: processes and pipes; knows no group, step or gateway.
"""

from __future__ import annotations

import contextlib
import os
import queue
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
from trainer.episodes import wire

#: Losses of its worker that one episode may see.
MOST_LOST = 5
#: Losses in a row, of workers that played nothing to its end: then no further one is started.
MOST_VAIN = 5
START_S = 600.0
ENDING_S = 10.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    ready: bool = False
    playing: dict[str, wire.Play] = field(default_factory=dict)


class EnvironmentPool:
    """`count` workers, each with `setup`. Use as a context manager: `ready` is what they told of the environment."""

    def __init__(
        self,
        setup: wire.Setup,
        *,
        count: int = 1,
        concurrency: int = 64,
        python: Path | None = None,
        argv: Sequence[str] = ("-P", "-m", "trainer.episodes.worker"),
        say: Callable[[str], None] = print,
    ) -> None:
        self._setup, self._count, self._concurrency, self._say = setup, count, concurrency, say
        self._argv = [str(python or sys.executable), *argv]
        self._workers: dict[int, _Worker] = {}
        self._events: queue.SimpleQueue[tuple[int, wire.Ready | wire.Played | None]] = queue.SimpleQueue()
        self._waiting: deque[wire.Play] = deque()
        self._lost: dict[str, int] = {}  # by episode
        self._given_up: list[wire.Played] = []
        self._started = self._vain = 0
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
        for worker in workers:
            _hang_up(worker)
        for worker in workers:
            try:
                worker.process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

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
        return [worker.process.pid for worker in self._workers.values()]

    # ---------------------------------------------------------------- processes

    def _start(self) -> None:
        number, self._started = self._started, self._started + 1
        # -P, and no empty entry: else the folder that the job was started in is among the packages, which a sandbox's programs may read.
        packages = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *packages])}
        process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        worker = self._workers[number] = _Worker(number, process)
        threading.Thread(
            target=self._read, args=(number, process), name=f"environment {number}", daemon=True
        ).start()
        self._tell(worker, self._setup)

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe, contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            while (frame := read_frame(pipe.read)) is not None:
                self._events.put((number, wire.to_trainer.decode(frame)))
        self._events.put((number, None))

    def _tell(self, worker: _Worker, message: wire.Setup | wire.Play) -> None:
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
        worker = self._workers.get(number)
        if worker is None:
            return []
        played: list[wire.Played] = []
        if message is None:
            self._ended(worker)
        elif isinstance(message, wire.Ready):
            if message.error:
                raise ConfigError(f"data.environment: {message.error}", message.remedy, quoted=message.output)
            worker.ready, self.ready = True, message
        elif worker.playing.pop(message.episode, None) is not None:
            self._vain = 0
            lost = self._lost.pop(message.episode, 0)
            if (
                lost and message.error and self._setup.effects == "external"
            ):  # what the lost worker asked, stays asked
                message = msgspec.structs.replace(message, final=True)
            played = [message]
        self._hand_out()
        return played

    def _ended(self, worker: _Worker) -> None:
        """It is replaced, and its episodes are played by others."""
        del self._workers[worker.number]
        worker.process.kill()
        code = worker.process.wait()
        _hang_up(worker)
        self.losses += 1
        self._vain += 1
        alone = not any(one.ready for one in self._workers.values())
        if self._vain > MOST_VAIN or (alone and not worker.ready):
            raise RewardError(
                f"environment workers end before they play anything to its end: exit status {code}, {self._vain} times",
                "look at their words in the training job's log",
            )
        self._say(
            f"an environment worker ended (exit status {code}): another one goes on with its {len(worker.playing)} episodes"
        )
        for name, ask in worker.playing.items():
            self._lost[name] = self._lost.get(name, 0) + 1
            if self._lost[name] < MOST_LOST:
                self.resumed += 1
                self._waiting.append(ask)
            else:
                why = f"its environment worker was lost {self._lost.pop(name)} times"
                # Another try would ask tools again whose effects are outside; whether any was asked, the lost worker knew.
                final = self._setup.effects == "external"
                self._given_up.append(wire.Played(name, error=why, final=final))
        self._start()

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
            worker.playing[ask.episode] = ask
            self._tell(worker, ask)


def _hang_up(worker: _Worker) -> None:
    """It reads its end, and ends."""
    assert worker.process.stdin is not None
    with contextlib.suppress(OSError):  # what was not sent has no reader any more
        worker.process.stdin.close()
