"""One node of an engine that spans two, as the job script starts it: both ends of the real link, and an engine that computes nothing.

    python -m tests.harvest.node_program FOLDER -m rollout --key FILE ... --nodes 2

Writes what became of it to FOLDER: a file a process, named after its place, its life and its node.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rollout.engines.base import EngineHost, Weight
from rollout.headless import HeadlessNode, HeadlessOptions
from rollout.node_link import FurtherNodes
from rollout.nodes import EngineNodes, JobNode, of_environment
from scavenger.protocol.keys import KeyPair, read_keypair
from scavenger.protocol.messages import EngineSpec

SPEC = EngineSpec("scripted", "{}", "float64", 8, 128)


class Part:
    def __init__(self, note: Path, host: EngineHost) -> None:
        self._note = note
        assert host.nodes is not None
        note.write_text(f"built {host.gpus} {host.nodes.place} {os.getpid()}")

    def place(self, version: int, views: Sequence[Weight]) -> None: ...

    def forget(self) -> None: ...

    async def died(self) -> str:
        await asyncio.Event().wait()
        return ""

    def close(self) -> None:
        self._note.write_text("closed")


async def first(here: JobNode, pair: KeyPair, note: Path, gpus: int) -> int:
    over: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(code: int) -> None:
        if not over.done():
            over.set_result(code)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, 75)
    link = FurtherNodes(here, pair, lambda _why: end(70))
    link.open()
    starting = asyncio.create_task(link.start(SPEC, "run", gpus))

    def started(task: asyncio.Task[EngineNodes]) -> None:
        if not task.cancelled() and task.exception() is None:
            note.write_text(f"started {gpus} 0 {os.getpid()}")

    starting.add_done_callback(started)
    code = await over
    starting.cancel()
    await link.close()
    return code


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("-m", dest="module")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--nodes", type=int)
    arguments, _ = parser.parse_known_args(argv)
    assert arguments.module == "rollout"
    here = of_environment(arguments.nodes, os.environ)
    pair, node = read_keypair(arguments.key), os.environ["SLURMD_NODENAME"]
    note = arguments.folder / f"{here.place}.{os.environ['SCAVENGER_RESTART_COUNT']}.{node}"
    gpus = int(os.environ["SCAVENGER_GPUS"]) * here.nodes
    if here.place == 0:
        return asyncio.run(first(here, pair, note, gpus))
    return asyncio.run(
        HeadlessNode(HeadlessOptions(here, pair, node), build=lambda _spec, host: Part(note, host)).run()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
