"""Weights between hosts, measured: one receiver beside iperf3 between the same two containers, and three hosts with four engines each that
join at once, each link at a bounded rate.

    python benchmarks/site_weights.py [--rates 1000,100] [--rounds 3] [--seconds 4]

Needs what `scripts/site-sandbox` needs: root on Debian, mmdebstrap, systemd-container. Hosts are containers with an address each on one
bridge; the rate of what reaches a host, and of what it sends, is bounded by Linux (tbf). What is sent takes `--seconds` at that rate.
Joiners are processes with the product's pull, source and directory: the benchmark is their router, and sends new holders to those that
still pull as often as the router does. On a machine with few cores all hosts share them: the last column says how busy it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import structlog

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.weights import MIB, make  # noqa: E402
from scavenger.cluster.sandbox.hosts import SITE, BootedHost, SiteSandbox, wait_for  # noqa: E402
from scavenger.protocol import keys, messages  # noqa: E402
from scavenger.router.core.worker_commands import OFFER_S  # noqa: E402
from scavenger.weights import manifest as manifests  # noqa: E402
from scavenger.weights.directory import WeightDirectory  # noqa: E402
from scavenger.weights.pull import Pull  # noqa: E402
from scavenger.weights.source import WeightServer  # noqa: E402
from scavenger.weights.transfer import TransferLimits  # noqa: E402

PYTHON, PROGRAM = "/opt/scavenger/bin/python", "/opt/scavenger-clone/benchmarks/site_weights.py"
SENDER, NODES, ENGINES = "train1", ("gpu1", "gpu2", "gpu3"), 4
IPERF_S = 4


# ---------------------------------------------------------------- on the hosts


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Lines:
    """Messages from a descriptor, a line of JSON each; nothing is read ahead of what `select` tells."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._rest, self.ended = descriptor, b"", False

    def fileno(self) -> int:
        return self.descriptor

    def read(self) -> list[dict[str, Any]]:
        """What has come; waits for some where nothing has."""
        got = os.read(self.descriptor, 1 << 20)
        self.ended = not got
        *lines, self._rest = (self._rest + got).split(b"\n")
        return [json.loads(line) for line in lines]

    def one(self) -> dict[str, Any]:
        """The next message alone: its sender waits for a reply before it sends another."""
        while True:
            for message in self.read():
                return message
            if self.ended:
                sys.exit("the other end is gone")


def packed(source: messages.WeightSource) -> str:
    return msgspec.msgpack.encode(source).hex()


def unpacked(text: str) -> messages.WeightSource:
    return msgspec.msgpack.decode(bytes.fromhex(text), type=messages.WeightSource)


def serve(address: str, nbytes: int, how: str) -> None:
    """The training job's rank: serves one version until its input ends."""
    manifest, buffer = make(nbytes)
    with WeightServer(address, encrypt=how == "curve", local=False) as source:
        tell(manifest=manifests.encode(manifest).hex(), source=packed(source.publish(manifest, buffer)))
        sys.stdin.read()


def join(address: str, how: str) -> None:
    """An engine: pulls the version from whom it is told, and serves what it has meanwhile; until its input ends."""
    with WeightServer(address, encrypt=how == "curve") as source:
        tell(ready=True)
        told = Lines(sys.stdin.fileno())
        first = told.one()
        manifest = manifests.decode(bytes.fromhex(first["manifest"]))
        work = Pull(manifest, keys.generate(), limits=TransferLimits())
        work.arrived = lambda chunk: source.arrived(manifest.version, chunk)
        tell(source=packed(source.publish_empty(manifest, work.buffer, work.coming)))
        began = time.monotonic()
        work.offer([unpacked(one) for one in first["offer"]])

        async def pulled() -> None:
            done = asyncio.ensure_future(work.finish(900.0))
            loop = asyncio.get_running_loop()

            def more() -> None:
                for message in told.read():
                    work.offer([unpacked(one) for one in message["offer"]])

            loop.add_reader(told.descriptor, more)
            await done
            loop.remove_reader(told.descriptor)

        asyncio.run(pulled())
        tell(seconds=time.monotonic() - began)
        while not told.ended:
            told.read()


# ---------------------------------------------------------------- over the site


class Program:
    """This file on a host, as the user of the daemon."""

    def __init__(self, host: BootedHost, *argv: str) -> None:
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "/opt/scavenger-clone"}
        command = host.command([PYTHON, PROGRAM, *argv], "scavenger", env)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.host, self.heard = host, Lines(self.process.stdout.fileno())

    def say(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def transferred(site: SiteSandbox, nbytes: int, how: str, engines: list[str]) -> list[float]:
    """Seconds that each engine took, all begun together. `engines`: the host of each."""
    with ExitStack() as stack:
        sender = stack.enter_context(
            Program(site[SENDER], "--serve", site[SENDER].spec.address, "--nbytes", str(nbytes), "--how", how)
        )
        joiners = [
            stack.enter_context(Program(site[name], "--join", site[name].spec.address, "--how", how))
            for name in engines
        ]
        for one in joiners:
            assert one.heard.one()["ready"]
        version = sender.heard.one()
        return _routed(version, joiners, engines)


def _routed(version: dict[str, Any], joiners: list[Program], engines: list[str]) -> list[float]:
    """What the router does for a version: chooses holders for each engine, and again while holders come."""
    directory, publisher = WeightDirectory(), (unpacked(version["source"]),)
    number = manifests.decode(bytes.fromhex(version["manifest"])).version
    offered = dict.fromkeys(range(len(joiners)), -1)

    def offer(i: int, **more: Any) -> None:
        chosen = directory.choose(number, i, engines[i], publisher)
        offered[i] = directory.revision(number)
        joiners[i].say(offer=[packed(source) for source in chosen.sources], **more)

    for i in range(len(joiners)):
        offer(i, manifest=version["manifest"])
    took: dict[int, float] = {}
    offered_at = time.monotonic()
    while len(took) < len(joiners):
        waiting = {one.heard: i for i, one in enumerate(joiners) if i not in took}
        for lines in select.select(list(waiting), [], [], OFFER_S / 5)[0]:
            i = waiting[lines]
            for heard in lines.read():
                if "source" in heard:
                    source = msgspec.structs.replace(unpacked(heard["source"]), complete=False)
                    directory.add_holder(number, i, engines[i], source)
                else:
                    took[i] = heard["seconds"]
                    directory.settled(i)
            if lines.ended:
                sys.exit(f"a program on {engines[i]} ended with {joiners[i].process.wait()}")
        if time.monotonic() - offered_at >= OFFER_S:
            offered_at = time.monotonic()
            for i in offered:
                if i not in took and offered[i] != directory.revision(number):
                    offer(i)
    return [took[i] for i in sorted(took)]


def iperf(site: SiteSandbox, receiver: str) -> float:
    """Bytes a second from the sender's host to this one, over as many connections as a pull has."""
    streams = str(TransferLimits().streams)
    server = subprocess.Popen(
        site[receiver].command(["iperf3", "-s", "-1"]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for("iperf3 listens", lambda: ":5201" in site[receiver].run("ss", "-Hltn", "sport = :5201"), 20)
        said = site[SENDER].run(
            "iperf3", "-c", site[receiver].spec.address, "-P", streams, "-t", str(IPERF_S), "-J"
        )
    finally:
        server.terminate()
        server.wait()
    rate: float = json.loads(said)["end"]["sum_received"]["bits_per_second"]
    return rate / 8


def busy() -> tuple[float, float]:
    """Seconds of CPU used and there were, of the whole machine."""
    used = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return float(sum(used) - used[3] - used[4]), float(sum(used))


def show(site: SiteSandbox, megabits: float, seconds: float, rounds: int) -> None:
    for name in (SENDER, *NODES):
        site.limit_rate(name, megabits)
    rate = megabits * 1e6 / 8
    nbytes = int(rate * seconds) // MIB * MIB
    print(f"\nevery host at {megabits:g} Mbit/s, a version of {nbytes / 1e6:.0f} MB, {rounds} rounds")
    yards, alone = [iperf(site, NODES[0])], {"tcp": list[float](), "curve": list[float]()}
    one, many, cpus = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        for how, found in alone.items():
            found.append(max(transferred(site, nbytes, how, [NODES[0]])))
        yards.append(iperf(site, NODES[0]))
        one.append(max(transferred(site, nbytes, "tcp", [NODES[0]] * ENGINES)))
        before = busy()
        many.append(max(transferred(site, nbytes, "tcp", [name for name in NODES for _ in range(ENGINES)])))
        used, there = (b - a for a, b in zip(before, busy(), strict=True))
        cpus.append(used / there)
    yard = statistics.median(yards)
    print(f"iperf3, as many connections      {yard / 1e6:7.1f} MB/s")
    for how, found in alone.items():
        shares = sorted(nbytes / taken / yard for taken in found)
        print(
            f"one receiver, {how:5}              {nbytes / statistics.median(found) / 1e6:7.1f} MB/s = "
            f"{statistics.median(shares):.2f} of iperf3 ({shares[0]:.2f} to {shares[-1]:.2f})"
        )
    ratios = sorted(b / a for a, b in zip(one, many, strict=True))
    print(f"one host, {ENGINES} engines               {statistics.median(one):7.1f} s until the last has it")
    print(
        f"{len(NODES)} hosts, {ENGINES} engines each         {statistics.median(many):7.1f} s = "
        f"{statistics.median(ratios):.2f} of that ({ratios[0]:.2f} to {ratios[-1]:.2f}); CPUs {statistics.median(cpus):.0%} busy",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="1000,100", help="Mbit/s, one after the other")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="that the version takes at the rate")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--join", default="", help=argparse.SUPPRESS)
    parser.add_argument("--how", default="tcp", help=argparse.SUPPRESS)
    parser.add_argument("--nbytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr)
    )  # messages go to standard output
    if options.serve:
        serve(options.serve, options.nbytes, options.how)
    elif options.join:
        join(options.join, options.how)
    else:
        made = subprocess.run(
            [ROOT / "scripts/site-sandbox", "--image"], stdout=subprocess.PIPE, text=True, check=True
        )
        hosts = [host for host in SITE if host.name in ("ctl", SENDER, *NODES)]
        with (
            tempfile.TemporaryDirectory(prefix="scv-site-") as folder,
            SiteSandbox(Path(made.stdout.split()[-1]), Path(folder), hosts) as site,
        ):
            print(f"{len(os.sched_getaffinity(0))} cores for all hosts")
            for rate in options.rates.split(","):
                show(site, float(rate), options.seconds, options.rounds)


if __name__ == "__main__":
    main()
