"""`python -m tests.system.shared_gpu -m trainer|rollout ...`: the program, on a GPU that two cannot use at once.

Such a GPU is a lock on the file SHARED_GPU: a reserved engine holds it from its start until its `sleep` has returned, and from its wake on;
the trainer holds it for each of its micro-steps. Who finds it taken writes that down, beside it, and does nothing else about it: the test
fails by what is written. Engines of harvested jobs, which lie elsewhere, share nothing.

SHARED_GPU_SLEEP says how the engine of each life falls asleep: "0.5" = in so many seconds, "never" = it hangs, deaf to SIGTERM; the last
of several holds for all further lives.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

PATH = "SHARED_GPU"
SLEEP = "SHARED_GPU_SLEEP"


def python(folder: Path) -> Path:
    """What SCAVENGER_PYTHON is set to."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.system.shared_gpu "$@"\n')
    program.chmod(0o755)
    return program


def written(path: Path) -> list[str]:
    beside = path.with_suffix(".log")
    return beside.read_text().splitlines() if beside.exists() else []


class Gpu:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a")

    def say(self, words: str) -> None:
        with self._path.with_suffix(".log").open("a") as log:
            log.write(words + "\n")

    def take(self, who: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.say(f"{who} finds the GPU taken")
        else:
            self.say(f"{who} has the GPU")

    def give(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def share_with_engine(gpu: Gpu) -> None:
    from rollout.engines.reference import ReferenceEngine

    sleep, wake = ReferenceEngine.sleep, ReferenceEngine.wake
    life, ways = int(os.environ["SCAVENGER_RESTART_COUNT"]), os.environ[SLEEP].split(",")
    way, me = ways[min(life, len(ways) - 1)], f"life {life} of the engine"
    gpu.take(me)

    async def falls_asleep(engine: Any) -> None:
        gpu.say(f"{me} is told to sleep")
        time.sleep(
            1e6 if way == "never" else float(way)
        )  # its only thread: it neither beats nor hears a signal
        await sleep(engine)
        gpu.say(f"{me} gives the GPU back")
        gpu.give()

    async def wakes(engine: Any) -> None:
        gpu.take(me)
        await wake(engine)

    ReferenceEngine.sleep, ReferenceEngine.wake = falls_asleep, wakes  # type: ignore[method-assign, assignment]


def share_with_trainer(gpu: Gpu) -> None:
    from trainer.loop.ranks import Ranks

    train = Ranks.train

    def trains(ranks: Ranks, one_round: Any) -> Any:
        gpu.take("the trainer")
        try:
            return train(ranks, one_round)
        finally:
            gpu.give()

    Ranks.train = trains  # type: ignore[method-assign, assignment]


def main() -> None:
    assert sys.argv[1] == "-m", sys.argv
    module, sys.argv = sys.argv[2], sys.argv[2:]
    if module == "rollout" and "reserved" in sys.argv:
        share_with_engine(Gpu(Path(os.environ[PATH])))
    elif module == "trainer":
        share_with_trainer(Gpu(Path(os.environ[PATH])))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
