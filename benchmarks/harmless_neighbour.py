"""The arm `beside` of `benchmarks.harmless`: how much slower is a job of somebody else with an engine on its node?

Their job does the same work over and over, in turn for the CPU (hashes 128 MiB) and for the disk (writes 32 MiB, has it on the disk, reads
it back). Demand for one engine comes and goes, and so does the engine, submitted by the daemon's harvester. Rounds that lay within an
engine's hold are compared with those of the same turn that lay in none, each turn on its own, so that what else the machine does cancels
out.

The engine is light in this: a process that keeps one CPU busy, as the host side of a real one does, and copies `--copies` MB a second
through memory, as the fetching of weights does. Nothing confines it but Slurm's own counting of CPUs (the private Slurm has no cgroups),
and the node is the whole machine: with fewer than two free CPUs the clock measures the machine's other load, and only the CPU time says
something.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scavenger.cluster.model import JobSpec
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.harvest.harvester import Harvester
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand

WORK = """\
import hashlib, os, sys, time
log, scratch = sys.argv[1:]
data = os.urandom(1 << 20)
while True:
    for kind in ("cpu", "disk"):
        at, spent = time.time(), time.process_time()
        if kind == "cpu":
            hashed = hashlib.sha256()
            for _ in range(128):
                hashed.update(data)
        else:
            with open(scratch, "wb") as file:
                for _ in range(32):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with open(scratch, "rb") as file:
                while file.read(1 << 20):
                    pass
        with open(log, "a") as file:
            print(kind, at, time.time() - at, time.process_time() - spent, file=file)
"""
BUSY = """\
import sys, time
data, rate = bytearray(1 << 20), float(sys.argv[1])
began, copied = time.monotonic(), 0
while True:
    if copied < rate * (time.monotonic() - began):
        bytes(data)
        copied += 1
    sum(range(1000))
"""
ENGINE = """\
{python} {folder}/busy.py {copies} &
busy=$!
trap 'kill "$busy"; exit 75' TERM
exec 9<> <(:)
while [ ! -e "$1.drain" ]; do read -r -t 0.3 -u 9; done
kill "$busy"
exit 0
"""
#: When it began, when its engine was there, when that was told to leave (Unix s).
Turn = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Round:
    """One piece of their work: what of the clock and of the CPU it took."""

    kind: str
    at: float
    took_s: float
    cpu_s: float


def engine_script(folder: Path, copies: float) -> str:
    return ENGINE.format(python=sys.executable, folder=folder, copies=copies)


async def replay(
    env: dict[str, str],
    folder: Path,
    made: Harvester,
    demand: list[Demand],
    records: Callable[[type], Sequence[object]],
    options: argparse.Namespace,
) -> list[str]:
    """Their job runs all the time; the engine comes and goes `--turns` times. Returns the report."""
    (folder / "work.py").write_text(WORK)
    (folder / "busy.py").write_text(BUSY)
    log, wanted = folder / "rounds", list(demand)
    script = f"#!/bin/bash\nexec {sys.executable} {folder}/work.py {log} {folder}/scratch\n"
    cluster = SlurmCluster(env)
    spec = JobSpec("beside", "", "normal", script, time_s=3600, workdir=str(folder), requeue=False)
    theirs = await asyncio.to_thread(cluster.submit, spec)
    stop = asyncio.Event()
    demand.clear()
    task = asyncio.create_task(made.run(stop))
    turns: list[Turn] = []

    def more(kind: type, than: int) -> Callable[[], bool]:
        return lambda: len(records(kind)) > than

    try:
        await _until("their job works", log.exists)
        for turn in range(options.turns):
            began = time.time()
            await asyncio.sleep(options.turn_s)  # the length of a measurement
            demand[:] = wanted
            await _until("an engine runs", more(rec.AllocationStarted, turn))
            there = time.time()
            await asyncio.sleep(options.turn_s)
            turns.append((began, there, time.time()))
            demand.clear()
            await _until("it has left", more(rec.AllocationEnded, turn))
    finally:
        await asyncio.to_thread(cluster.cancel, (theirs,))
        stop.set()
        await task
    return report(read(log), turns, options.turn_s)


async def _until(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within 60 s: {what}")
        await asyncio.sleep(0.05)


def read(log: Path) -> list[Round]:
    found = []
    for line in log.read_text().splitlines():
        kind, at, took, cpu = line.split()
        found.append(Round(kind, float(at), float(took), float(cpu)))
    return found


def slower(
    rounds: Sequence[Round], turns: Sequence[Turn], turn_s: float, of: Callable[[Round], float]
) -> list[float]:
    """Of each turn: the median round beside an engine over the median one without, less one."""
    found = []
    for began, there, ended in turns:
        alone = [of(one) for one in rounds if one.at >= began and one.at + one.took_s <= began + turn_s]
        beside = [of(one) for one in rounds if one.at >= there and one.at + one.took_s <= ended]
        if alone and beside:
            found.append(statistics.median(beside) / statistics.median(alone) - 1)
    return found


def report(rounds: Sequence[Round], turns: Sequence[Turn], turn_s: float) -> list[str]:
    lines = ["| work | rounds | slower by (median of turns) | least | most |", "| --- " * 5 + "|"]
    for kind, what, of in (
        ("cpu", "CPU, by the clock", lambda one: one.took_s),
        ("cpu", "CPU, CPU time", lambda one: one.cpu_s),
        ("disk", "disk, by the clock", lambda one: one.took_s),
    ):
        mine = [one for one in rounds if one.kind == kind]
        shares = slower(mine, turns, turn_s, of)
        if shares:
            lines.append(
                f"| {what} | {len(mine)} | {statistics.median(shares):+.1%} | {min(shares):+.1%} | {max(shares):+.1%} |"
            )
    return lines
