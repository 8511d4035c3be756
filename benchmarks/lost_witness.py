"""`python -m benchmarks.lost_witness FOLDER -m rollout ...`: the worker with its reference engine, whose every token is noted in FOLDER.

A line a piece of tokens, in a file of the process: Unix time, the stream of random numbers that the sample has, the place of the first
token in the completion, how many tokens. A line is one write to the kernel, so a process that is killed has noted all that its worker was
given. Nothing of the engine is changed.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lost_account import Generated

if TYPE_CHECKING:
    from rollout.engines.reference import ReferenceEngine
    from scavenger.protocol.worker.events import Delta, Request

ROOT = Path(__file__).resolve().parents[1]


def python(folder: Path) -> Path:
    """A Python for `harvest.python` and SCAVENGER_PYTHON: engines that it is asked to run are watched, all else runs as it is."""
    program = folder / "python-with-witness"
    runs, watched = shlex.quote(sys.executable), f"-m benchmarks.lost_witness {shlex.quote(str(folder))}"
    program.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))}\n"
        f'if [ "$1 $2" = "-m rollout" ]; then exec {runs} {watched} "$@"; fi\nexec {runs} "$@"\n'
    )
    program.chmod(0o755)
    return program


def watch(folder: Path) -> None:
    """Have every reference engine of this process note what it generates."""
    from rollout.engines.reference import ReferenceEngine

    add, following = ReferenceEngine.add, ReferenceEngine.next
    notes = os.open(folder / f"{os.getpid()}.generated", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    streams: dict[int, str] = {}  # by handle
    lengths: dict[int, int] = {}

    async def noted_add(engine: ReferenceEngine, request: Request) -> None:
        key = request.key
        streams[request.handle] = f"{key.purpose}/{key.step}/{key.prompt}/{key.index}"
        lengths[request.handle] = len(request.accepted)
        await add(engine, request)

    async def noted_next(engine: ReferenceEngine) -> list[Delta]:
        deltas = await following(engine)
        os.write(notes, _lines(deltas).encode())
        return deltas

    def _lines(deltas: Iterable[Delta]) -> str:
        now, lines = time.time(), ""
        for delta in deltas:
            count = len(delta.token_ids)
            lines += f"{now:.4f} {streams[delta.handle]} {lengths[delta.handle]} {count}\n"
            lengths[delta.handle] += count
        return lines

    setattr(ReferenceEngine, "add", noted_add)  # noqa: B010
    setattr(ReferenceEngine, "next", noted_next)  # noqa: B010


def read(folder: Path) -> list[Generated]:
    """What all processes have noted.."""
    return [
        Generated(float(at), int(path.stem), stream, int(start), int(count))
        for path in sorted(folder.glob("*.generated"))
        for at, stream, start, count in map(str.split, path.read_text().splitlines())
    ]


def main() -> None:
    folder, flag, module = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    assert flag == "-m", sys.argv
    sys.argv = sys.argv[3:]
    watch(folder)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
