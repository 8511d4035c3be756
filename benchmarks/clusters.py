"""One version on its way to another cluster over a slow link: the bytes that cross it, and how long eight engines there take beside one.

    python -m benchmarks.clusters [--across 1000,200] [--inside 2000] [--nodes 2] [--engines 4] [--seconds 8] [--rounds 3] [--lose]

Needs root and iproute2: hosts are network namespaces with an address each on two bridges, one a cluster, and a link between the bridges;
what each link carries is bounded by Linux (tbf, both ways), and the bytes across are the link's own counters. The training job's rank is on
one cluster, the engines on the other; they are processes with the product's store, pull, source and directory under CURVE: the benchmark
is their router. The first version crosses whole (`--seconds` at the link's rate), the second as deltas, made before: 1 in 8 of its values
changed. `--lose` kills the engine that crosses when half of the first version is over. On a machine with few cores all hosts share them.
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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog

from benchmarks.site_weights import Lines, tell
from benchmarks.weights import MIB, make
from scavenger.protocol import keys, messages
from scavenger.router.core.worker_commands import OFFER_S
from scavenger.weights import manifest as manifests
from scavenger.weights.directory import WeightDirectory
from scavenger.weights.engine_store import Store
from scavenger.weights.memory import Buffer
from scavenger.weights.source import WeightServer

ROOT = Path(__file__).resolve().parents[1]
#: Of the values, that the second version has anew.
CHANGED = 8
DEADLINE_S = 600.0


def packed(message: msgspec.Struct) -> str:
    return msgspec.msgpack.encode(message).hex()


# ---------------------------------------------------------------- on the hosts


def publish(address: str, nbytes: int) -> None:
    """The training job's rank: publishes a version for each line that comes."""
    manifest, buffer = make(nbytes)
    with WeightServer(address, encrypt=True, deltas=2) as source:
        orders, number = Lines(sys.stdin.fileno()), 1
        while not orders.ended:
            for _ in orders.read():
                if number > 1:
                    manifest, buffer = changed(manifest, buffer, number)
                address_of_it = source.publish(manifest, buffer)
                source.wait_deltas()
                tell(manifest=manifests.encode(manifest).hex(), source=packed(address_of_it))
                number += 1


def changed(manifest: manifests.Manifest, buffer: Buffer, number: int) -> tuple[manifests.Manifest, Buffer]:
    new = Buffer(len(buffer.view))
    new.prepare(len(buffer.view))
    new.view[:] = buffer.view
    values = np.frombuffer(new.view, dtype=np.uint16)
    chosen = np.random.default_rng(number).integers(0, len(values), len(values) // CHANGED)
    values[chosen] ^= 3
    table = manifests.layout({"w": ("bfloat16", (len(values),))})
    size = manifest.chunk_nbytes
    return manifests.seal(number, table, manifests.hashes_of(new.view, size), chunk_nbytes=size), new


def engine(address: str) -> None:
    """An engine's process: loads what it is ordered to, and serves it on, until its input ends."""
    orders = Lines(sys.stdin.fileno())

    def serving(message: messages.Serving) -> None:
        tell(serving=packed(message))

    async def work() -> None:
        store, loads = Store(keys.generate(), serving, lambda: address), set[asyncio.Task[None]]()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        async def load(order: messages.UseWeights) -> None:
            began = time.monotonic()
            await store.get(manifests.decode(order.manifest), order, DEADLINE_S)
            tell(loaded=order.version, seconds=time.monotonic() - began, chosen=store.chosen)

        def take() -> None:
            for message in orders.read():
                order = msgspec.msgpack.decode(bytes.fromhex(message["order"]), type=messages.UseWeights)
                if order.more:
                    store.offer(order)
                else:
                    loads.add(asyncio.create_task(load(order)))
            if orders.ended:
                ended.set()

        loop.add_reader(orders.descriptor, take)
        tell(ready=True)
        await ended.wait()
        store.close()

    asyncio.run(work())


# ---------------------------------------------------------------- two clusters


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@dataclass
class Hosts:
    """Two clusters in network namespaces. `inside`, `across`: Mbit/s of each host's link, and of the one between the clusters."""

    nodes: int
    inside: float
    across: float
    name: str = field(default_factory=lambda: f"scvx{os.getpid()}")

    def __enter__(self) -> Hosts:
        ip("netns", "add", self.core)
        for bridge in ("bra", "brb"):
            self.ip("link", "add", bridge, "type", "bridge")
            self.ip("link", "set", bridge, "up")
        self.ip("link", "add", "across_a", "type", "veth", "peer", "name", "across_b")
        for end in ("a", "b"):
            self.ip("link", "set", f"across_{end}", "master", f"br{end}", "up")
            self.bound(self.core, f"across_{end}", self.across)
        self.add("train", "bra", "10.77.0.1")
        for number in range(1, self.nodes + 1):
            self.add(f"n{number}", "brb", self.address(number))
        return self

    def __exit__(self, *_exc: object) -> None:
        for name in (*(f"n{number}" for number in range(1, self.nodes + 1)), "train", "core"):
            subprocess.run(["ip", "netns", "del", self.space(name)], stderr=subprocess.DEVNULL, check=False)

    @property
    def core(self) -> str:
        return self.space("core")

    def space(self, host: str) -> str:
        return f"{self.name}{host}"

    def address(self, number: int) -> str:
        return f"10.77.1.{number}"

    def ip(self, *words: str) -> None:
        ip("-n", self.core, *words)

    def bound(self, space: str, device: str, megabits: float) -> None:
        limit = f"rate {megabits:g}mbit burst 256kb latency 200ms"
        argv = [
            "ip",
            "netns",
            "exec",
            space,
            "tc",
            "qdisc",
            "add",
            "dev",
            device,
            "root",
            "tbf",
            *limit.split(),
        ]
        subprocess.run(argv, check=True)

    def add(self, host: str, bridge: str, address: str) -> None:
        space = self.space(host)
        ip("netns", "add", space)
        self.ip("link", "add", f"to_{host}", "type", "veth", "peer", "name", "eth0", "netns", space)
        self.ip("link", "set", f"to_{host}", "master", bridge, "up")
        ip("-n", space, "addr", "add", f"{address}/16", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", space, "link", "set", device, "up")
        self.bound(space, "eth0", self.inside)
        self.bound(self.core, f"to_{host}", self.inside)

    def crossed(self) -> int:
        """Bytes that went from the training job's cluster to the other one, headers and all."""
        path = "/sys/class/net/across_a/statistics/tx_bytes"
        argv = ["ip", "netns", "exec", self.core, "cat", path]
        return int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)

    @contextmanager
    def program(self, host: str, *argv: str) -> Iterator[Program]:
        command = [
            "ip",
            "netns",
            "exec",
            self.space(host),
            sys.executable,
            "-m",
            "benchmarks.clusters",
            *argv,
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=env)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Program(process, Lines(process.stdout.fileno()))
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@dataclass
class Program:
    process: subprocess.Popen[bytes]
    heard: Lines

    def say(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()


@dataclass
class Crossing:
    """One version in all engines: `seconds` until the last had it, `nbytes` over the link, `whole`: of the version."""

    seconds: float
    nbytes: int
    whole: int


class Site:
    """The engines of cluster b, and what the router does for them. `shared`: whether its directory knows of clusters."""

    def __init__(
        self, hosts: Hosts, trainer: Program, engines: list[tuple[str, Program]], *, shared: bool
    ) -> None:
        self.hosts, self.trainer, self.engines = hosts, trainer, dict(enumerate(engines))
        self.directory, self.shared, self.crosses = WeightDirectory(), shared, -1
        self._offered: dict[int, int] = {}

    def _order(
        self, number: int, worker: int, manifest: bytes, source: messages.WeightSource, total: int
    ) -> None:
        node, program = self.engines[worker]
        chosen = self.directory.choose(
            number,
            worker,
            f"b/{node}",
            (source,),
            cluster="b" if self.shared else "",
            nbytes=total,
            now=time.monotonic(),
        )
        self._offered[worker] = self.directory.revision(number)
        order = messages.UseWeights(number, manifest, chosen.sources, more=not manifest, encrypt=True)
        program.say(order=packed(order))

    def version(self, *, lose: bool = False) -> Crossing:
        """Publish one more, and have all engines load it."""
        self.trainer.say(publish=True)
        said = self.trainer.heard.one()
        manifest = bytes.fromhex(said["manifest"])
        source = msgspec.msgpack.decode(bytes.fromhex(said["source"]), type=messages.WeightSource)
        decoded = manifests.decode(manifest)
        number, total = decoded.version, decoded.total_nbytes
        before, began = self.hosts.crossed(), time.monotonic()
        for worker in self.engines:
            self._order(number, worker, manifest, source, total)
        left, offered_at = set(self.engines), began
        while left:
            waiting = {self.engines[worker][1].heard: worker for worker in self.engines}
            for lines in select.select(list(waiting), [], [], OFFER_S / 5)[0]:
                self._hear(waiting[lines], number, total, left)
            crossed = self.hosts.crossed() - before
            if lose and crossed > total / 2 and (one := self.directory.crosses(number, "b")) is not None:
                lose = False
                self.engines[one][1].process.kill()
            if time.monotonic() - offered_at >= OFFER_S:
                offered_at = time.monotonic()
                for worker in sorted(left):
                    if self._offered[worker] != self.directory.revision(number):
                        self._order(number, worker, b"", source, total)
            if time.monotonic() - began > DEADLINE_S:
                sys.exit(f"version {number} is not everywhere after {DEADLINE_S:g} s")
        return Crossing(time.monotonic() - began, self.hosts.crossed() - before, total)

    def _hear(self, worker: int, number: int, total: int, left: set[int]) -> None:
        node, program = self.engines[worker]
        for message in program.heard.read():
            if "serving" in message:
                serving = msgspec.msgpack.decode(bytes.fromhex(message["serving"]), type=messages.Serving)
                if serving.source is None:
                    self.directory.drop(serving.version, worker)
                    continue
                self.directory.add_holder(
                    serving.version,
                    worker,
                    f"b/{node}",
                    serving.source,
                    "b" if self.shared else "",
                    nbytes=total,
                    now=time.monotonic(),
                )
            elif message.get("loaded") == number:
                left.discard(worker)
                self.directory.settled(worker)
        if program.heard.ended:
            self.directory.gone(worker)
            left.discard(worker)
            del self.engines[worker]


@contextmanager
def site(hosts: Hosts, nbytes: int, engines: int, *, shared: bool = True) -> Iterator[Site]:
    """`engines` on each node of cluster b, which have loaded nothing yet."""
    with ExitStack() as stack:
        trainer = stack.enter_context(
            hosts.program("train", "--publish", "10.77.0.1", "--nbytes", str(nbytes))
        )
        begun = [
            (f"n{node}", stack.enter_context(hosts.program(f"n{node}", "--engine", hosts.address(node))))
            for node in range(1, hosts.nodes + 1)
            for _ in range(engines)
        ]
        for _, program in begun:
            assert program.heard.one()["ready"]
        yield Site(hosts, trainer, begun, shared=shared)


# ---------------------------------------------------------------- what is shown


def show(options: argparse.Namespace, across: float) -> None:
    nbytes = int(across * 1e6 / 8 * options.seconds) // MIB * MIB
    many = options.nodes * options.engines
    print(
        f"\n{across:g} Mbit/s across, {options.inside:g} inside; a version of {nbytes / 1e6:.0f} MB, {options.rounds} rounds"
    )
    found: dict[str, list[tuple[Crossing, Crossing]]] = {
        "one engine": [],
        f"{many} engines": [],
        "no cluster level": [],
    }
    for _ in range(options.rounds):
        for what, nodes, engines, shared in (
            ("one engine", 1, 1, True),
            (f"{many} engines", options.nodes, options.engines, True),
            ("no cluster level", options.nodes, options.engines, False),
        ):
            with (
                Hosts(nodes, options.inside, across) as hosts,
                site(hosts, nbytes, engines, shared=shared) as made,
            ):
                found[what].append((made.version(), made.version()))
    for index, update in enumerate(("whole", "deltas")):
        alone = [pair[index] for pair in found["one engine"]]
        for what, pairs in found.items():
            took = sorted(pair[index].seconds / one.seconds for pair, one in zip(pairs, alone, strict=True))
            crossed = sorted(pair[index].nbytes / one.nbytes for pair, one in zip(pairs, alone, strict=True))
            middle = statistics.median(pair[index].seconds for pair in pairs)
            nbytes_across = statistics.median(pair[index].nbytes for pair in pairs)
            print(
                f"{update:7} {what:18} {middle:7.2f} s = {statistics.median(took):.2f} of one engine's ({took[0]:.2f} to {took[-1]:.2f}); "
                f"{nbytes_across / 1e6:8.1f} MB across = {statistics.median(crossed):.3f} of its ({crossed[0]:.3f} to {crossed[-1]:.3f}), "
                f"{nbytes_across / nbytes:.3f} of the version",
                flush=True,
            )
    if options.lose:
        with (
            Hosts(options.nodes, options.inside, across) as hosts,
            site(hosts, nbytes, options.engines) as made,
        ):
            lost = made.version(lose=True)
        print(
            f"whole   the one that crosses is killed half-way: {lost.seconds:.2f} s, {lost.nbytes / nbytes:.3f} of the version across"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--across", default="1000,200", help="Mbit/s between the clusters, one after the other"
    )
    parser.add_argument("--inside", type=float, default=2000.0, help="Mbit/s of each host's own link")
    parser.add_argument("--nodes", type=int, default=2, help="of the further cluster")
    parser.add_argument("--engines", type=int, default=4, help="on each of them")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="that the version takes at the rate across"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lose", action="store_true", help="also lose the engine that crosses")
    parser.add_argument("--publish", default="", help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--nbytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if options.publish:
        publish(options.publish, options.nbytes)
    elif options.engine:
        engine(options.engine)
    else:
        print(f"{len(os.sched_getaffinity(0))} cores for all hosts")
        for across in options.across.split(","):
            show(options, float(across))


if __name__ == "__main__":
    main()
