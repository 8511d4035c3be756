"""`python -m tests.system.faulty -m trainer|rollout ...`: the program, with the fault that its environment names.

FAULTY_SLEEP says how the reserved engine of each life falls asleep: "0.5" = in so many seconds, "never" = it hangs, deaf to SIGTERM; the
last of several holds for all further lives. What it does is written to the file FAULTY_LOG. FAULTY_TRAINER = "impatient": rank 0 takes
every order to sleep for carried out, as it once did.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

SLEEP, LOG, TRAINER = "FAULTY_SLEEP", "FAULTY_LOG", "FAULTY_TRAINER"


def environment(folder: Path, *, sleep: str = "0.0", trainer: str = "") -> dict[str, str]:
    """Of the training job. `folder` gets its Python, and what was written."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.system.faulty "$@"\n')
    program.chmod(0o755)
    names = {SLEEP: sleep, LOG: str(folder / "faulty.log"), TRAINER: trainer}
    return {"SCAVENGER_PYTHON": str(program)} | names


def written(folder: Path) -> list[str]:
    log = folder / "faulty.log"
    return log.read_text().splitlines() if log.exists() else []


def say(words: str) -> None:
    with Path(os.environ[LOG]).open("a") as log:
        log.write(words + "\n")


def sleep_slowly() -> None:
    from rollout.engines.reference import ReferenceEngine

    sleep = ReferenceEngine.sleep
    life, ways = int(os.environ["SCAVENGER_RESTART_COUNT"]), os.environ[SLEEP].split(",")
    way, me = ways[min(life, len(ways) - 1)], f"life {life} of the engine"

    async def falls_asleep(engine: Any) -> None:
        say(f"{me} is told to sleep")
        time.sleep(
            1e6 if way == "never" else float(way)
        )  # its only thread: it neither beats nor hears a signal
        await sleep(engine)
        say(f"{me} gives the GPU back")

    ReferenceEngine.sleep = falls_asleep  # type: ignore[method-assign, assignment]


def train_at_once() -> None:
    from scavenger.protocol import reserved_memory, train_step

    reserved_memory.observe = lambda *_args, **_how: reserved_memory.ReservedObservation(
        train_step.ReservedAsleep(1, 0)
    )


def main() -> None:
    assert sys.argv[1] == "-m", sys.argv
    module, sys.argv = sys.argv[2], sys.argv[2:]
    if module == "rollout" and "reserved" in sys.argv:
        sleep_slowly()
    elif module == "trainer" and os.environ[TRAINER] == "impatient":
        train_at_once()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
