"""How fast the ledger takes tokens, moves samples and starts again: issue 3's goals, measured on the real parts.

    python benchmarks/ledger.py [--database sqlite|postgres|both] [--only ingest,latency,failover,restart,memory] [--quick]

Ingest, latency and failover run the daemon's server, router and writer in this process and a generator in another one, over CURVE; restart
and memory run `python -m scavenger daemon`. Every figure is a median of repeats with its range; a missed goal is printed as missed.
`--quick` makes everything small: it shows that the benchmark works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Not this file's folder: a benchmark in it has the name of a package.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place).resolve() != ROOT / "benchmarks")]

from benchmarks import ledger_history as history  # noqa: E402  after the path, as all that follows
from benchmarks.ledger_engines import CHUNK  # noqa: E402
from benchmarks.ledger_site import Cpu, Site, read_settings  # noqa: E402
from scavenger.ledger import store  # noqa: E402
from tests.private_postgres import PrivatePostgres, create_database  # noqa: E402

PARTS = ("ingest", "latency", "failover", "restart", "memory")
ALL = "all together"
GOAL_TOKENS_S = {"sqlite": 2_000_000.0, "postgres": 1_500_000.0}


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    connections: int = 64
    samples: int = 64_000  # 1,000 engines of 64 samples
    flushes: int = 5  # of each connection in one repeat of ingest
    window: int = 2  # flushes of a connection that may wait for their ack
    paced_flushes: int = 4
    repeats: int = 3
    failover_samples: int = 10_000
    failover_engines: int = 10
    restart_samples: int = 100_000
    restart_tokens: int = 1_000
    memory_samples: int = 256_000


QUICK = Size(4, 320, 2, 2, 2, 1, 160, 2, 400, 100, 800)


@dataclass
class BenchmarkRow:
    """One line of the table. `goal` None: stated only. `most`: the goal is an upper bound."""

    database: str
    what: str
    unit: str
    values: Sequence[float]
    goal: float | None = None
    most: bool = True
    load: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        met = self.median <= self.goal if self.most else self.median >= self.goal
        bound = f"{'at most' if self.most else 'at least'} {_number(self.goal)}"
        return f"{self.median / self.goal:.2f} of {bound}: {'met' if met else 'MISSED'}"


@dataclass
class Report:
    rows: list[BenchmarkRow] = field(default_factory=list)

    def add(
        self,
        database: str,
        what: str,
        unit: str,
        values: Sequence[float],
        goal: float | None = None,
        *,
        most: bool = True,
    ) -> None:
        row = BenchmarkRow(database, what, unit, list(values), goal, most, os.getloadavg()[0])
        self.rows.append(row)
        print(_line(row), flush=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _line(row: BenchmarkRow) -> str:
    spread = f"{_number(min(row.values))} - {_number(max(row.values))}"
    figures = f"{_number(row.median):>10} | {spread:>23} | {row.unit:8} | load {row.load:4.1f}"
    return f"{row.database:8} | {row.what:50} | {figures} | {row.verdict}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# ---------------------------------------------------------------- ingest and latency


async def ingest(report: Report, database: str, url: str, size: Size, parts: set[str]) -> None:
    """Durable tokens a second at saturation, CPU a chunk, then commit latency at half that rate, on one ledger."""
    site = Site(url, size.samples, size.samples // size.connections, size.connections)
    async with site.running():
        await site.do("open")
        await site.do("join", numbers=list(range(size.connections)), want=size.samples)
        held = (await site.do("prepare"))["samples"]
        print(
            f"# {database}: {size.connections} connections hold {min(held)}-{max(held)} samples each",
            flush=True,
        )
        pids = site.database_pids()
        rates: list[float] = []
        costs: dict[str, list[float]] = {}
        for _ in range(size.repeats):
            before = site.cpu(pids)
            reply = await site.do("ingest", flushes=size.flushes, window=size.window)
            assert reply["tokens"] == size.samples * size.flushes * CHUNK, (
                "every token was acknowledged as durable"
            )
            rates.append(reply["tokens"] / reply["took_s"])
            _costs(costs, before, site.cpu(pids), reply)
        if "ingest" in parts:
            report.add(database, "durable ingest", "tokens/s", rates, GOAL_TOKENS_S[database], most=False)
            for name, values in costs.items():
                report.add(database, f"CPU a chunk: {name}", "us", values)
            cores = len(os.sched_getaffinity(0))
            most = [1e6 * cores * CHUNK / each for each in costs[ALL]]
            report.add(database, f"  what that allows {cores} idle cores at most", "tokens/s", most)
        if "latency" in parts:
            await _latency(report, database, site, size, statistics.median(rates) / 2)


def _costs(costs: dict[str, list[float]], before: Cpu, after: Cpu, reply: dict[str, Any]) -> None:
    """Microseconds of CPU a chunk, by who spent them."""
    chunks = reply["tokens"] / CHUNK

    def add(name: str, seconds: float) -> None:
        costs.setdefault(name, []).append(1e6 * seconds / chunks)

    core, loop = after.core - before.core, after.loop - before.loop
    writer, process = after.writer - before.writer, after.process - before.process
    database = after.database - before.database
    add("generator", reply["cpu_s"])
    add("router core", core)
    add("server edge (loop's thread less core)", loop - core)
    add("server I/O (ZeroMQ's threads, CURVE)", process - loop - writer)
    add("writer thread", writer)
    if database:
        add("PostgreSQL's processes", database)
    add(ALL, reply["cpu_s"] + process + database)


async def _latency(report: Report, database: str, site: Site, size: Size, rate: float) -> None:
    every = size.samples * CHUNK / rate
    p50, p99, got = [], [], []
    for _ in range(size.repeats):
        reply = await site.do("paced", every_s=every, flushes=size.paced_flushes)
        p50.append(1e3 * percentile(reply["latencies"], 0.5))
        p99.append(1e3 * percentile(reply["latencies"], 0.99))
        got.append(reply["tokens"] / reply["took_s"])
    report.add(database, "commit latency p50, at half that load", "ms", p50)
    report.add(database, "commit latency p99, at half that load", "ms", p99, 250.0)
    report.add(database, "  load while that was measured", "tokens/s", got)


# ---------------------------------------------------------------- failover


async def failover(report: Report, database: str, url: str, size: Size) -> None:
    """Engines with many samples are declared dead; how long until each sample's lease is at another engine."""
    n = size.failover_engines
    site = Site(url, size.failover_samples, size.failover_samples // n, 2 * n)
    halves = [list(range(n)), list(range(n, 2 * n))]
    p50, p99, folded = [], [], []
    async with site.running():
        await site.do("open")
        await site.do("join", numbers=halves[0], want=size.failover_samples)
        await site.do("prepare")
        await site.do("ingest", flushes=1, window=1)
        for repeat in range(size.repeats):
            dead, other = halves[repeat % 2], halves[1 - repeat % 2]
            incarnation = (repeat + 1) // 2
            await site.do("join", numbers=other, want=0, incarnation=incarnation)
            await site.do("die", numbers=dead)
            await site.settled()
            site.begin("moved")
            declared = time.monotonic()
            site.declare_dead(dead)
            arrived = (await site.reply())["at"]
            p50.append(1e3 * (percentile(arrived, 0.5) - declared))
            p99.append(1e3 * (percentile(arrived, 0.99) - declared))
            await site.settled()
            folded.append(1e3 * (time.monotonic() - declared))
    what = f"{size.failover_samples:,} samples of {n} dead engines leased again"
    report.add(database, f"{what}, p50", "ms", p50)
    report.add(database, f"{what}, p99", "ms", p99, 100.0)
    report.add(database, "  until all of it is in `leases` and `samples` too", "ms", folded)


# ---------------------------------------------------------------- restart and memory


def restart(report: Report, database: str, url: str, size: Size, folder: Path) -> None:
    started = time.monotonic()
    history.write(url, size.restart_samples, size.restart_tokens)
    took = time.monotonic() - started
    print(
        f"# {database}: wrote {size.restart_samples:,} samples x {size.restart_tokens} tokens in {took:.0f} s",
        flush=True,
    )
    seconds, rss = [], []
    for _ in range(size.repeats):
        with history.daemon(folder, url) as (start_s, pid):
            seconds.append(start_s)
            rss.append(history.rss_bytes(pid) / 2**20)
    tokens = size.restart_samples * size.restart_tokens
    report.add(database, f"restart, {size.restart_samples:,} samples, {tokens:,} tokens", "s", seconds, 10.0)
    report.add(database, "  memory of that daemon", "MiB", rss)


def memory(report: Report, database: str, new_url: Any, size: Size, folder: Path) -> None:
    """Resident memory of a daemon that has just restarted, with no sample and with many in flight."""
    figures: dict[int, list[float]] = {}
    for samples in (0, size.memory_samples):
        url = new_url()
        history.write(url, samples, CHUNK)
        for _ in range(size.repeats):
            with history.daemon(folder, url) as (_, pid):
                figures.setdefault(samples, []).append(history.rss_bytes(pid))
    report.add(database, "memory of a daemon without samples", "MiB", [v / 2**20 for v in figures[0]])
    many = figures[size.memory_samples]
    report.add(
        database, f"memory with {size.memory_samples:,} samples in flight", "MiB", [v / 2**20 for v in many]
    )
    base = statistics.median(figures[0])
    report.add(database, "  that is, a sample", "bytes", [(v - base) / size.memory_samples for v in many])


# ---------------------------------------------------------------- the command


@contextlib.contextmanager
def databases(kind: str, folder: Path) -> Iterator[Any]:
    """A function that makes the URL of a new, empty ledger."""
    made = 0
    if kind == "sqlite":

        def sqlite() -> str:
            nonlocal made
            made += 1
            return f"sqlite:///{folder / f'ledger{made}.sqlite3'}"

        yield sqlite
        return
    with PrivatePostgres({"max_wal_size": "8GB", "shared_buffers": "512MB"}) as server:

        def postgres() -> str:
            nonlocal made
            made += 1
            return create_database(server.url, f"ledger_{made}")

        yield postgres


def measure(kind: str, size: Size, parts: set[str], report: Report) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="scavenger-bench-") as name,
        databases(kind, Path(name)) as new_url,
    ):
        folder = Path(name)
        url = new_url()
        store.upgrade(url)
        print(f"# {kind}: " + ", ".join(f"{k} = {v}" for k, v in read_settings(url).items()), flush=True)
        if parts & {"ingest", "latency"}:
            asyncio.run(ingest(report, kind, url, size, parts))
        if "failover" in parts:
            asyncio.run(failover(report, kind, new_url(), size))
        if "restart" in parts:
            restart(report, kind, new_url(), size, folder)
        if "memory" in parts:
            memory(report, kind, new_url, size, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--only", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny: shows that it works")
    options = parser.parse_args()
    parts = set(options.only.split(","))
    if unknown := parts - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))}? choose from {', '.join(PARTS)}")
    print(
        f"# {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, host {platform.node()}, {len(os.sched_getaffinity(0))} cores, "
        f"{platform.platform()}, Python {platform.python_version()}{', QUICK: figures mean nothing' if options.quick else ''}"
    )
    report = Report()
    for kind in ("sqlite", "postgres") if options.database == "both" else (options.database,):
        measure(kind, QUICK if options.quick else Size(), parts, report)
    missed = [row.what for row in report.rows if "MISSED" in row.verdict]
    print(f"# goals missed: {'; '.join(missed) if missed else 'none'}")
    sys.exit(0)


if __name__ == "__main__":
    main()
