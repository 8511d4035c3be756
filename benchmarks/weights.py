"""The weights plane against its goals: one receiver beside iperf3, sixteen late joiners, what publishing costs a step, deltas.

    python benchmarks/weights.py [--only pull,relay] [--gigabytes 2] [--streams 4]
    mpirun -n 2 python benchmarks/weights.py --only publish

Sender and receiver are processes of their own, as iperf3's are. Ratios are of one run on one machine: iperf3 runs before and after each
transport, and the mean of both is the yardstick. Needs `iperf3` (Debian has it); without it rates are told without a ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights.memory import Buffer
from scavenger.weights.pull import Pull
from scavenger.weights.source import WeightServer
from scavenger.weights.transfer import TransferLimits

MIB = 1 << 20


def make(nbytes: int, version: int = 1) -> tuple[manifests.Manifest, Buffer]:
    """A version of one tensor, its bytes not all alike."""
    nbytes = nbytes // MIB * MIB
    buffer = Buffer(nbytes)
    buffer.prepare(nbytes)
    block = np.random.default_rng(version).integers(0, 256, MIB, dtype=np.uint8)
    for start in range(0, nbytes, MIB):
        block[:8] = np.frombuffer(start.to_bytes(8, "little"), dtype=np.uint8)
        buffer.view[start : start + MIB] = block.data
    table = manifests.layout({"w": ("bfloat16", (nbytes // 2,))})
    size = manifests.chunk_nbytes_of(nbytes)
    return manifests.seal(version, table, manifests.hashes_of(buffer.view, size), chunk_nbytes=size), buffer


# ---------------------------------------------------------------- one receiver


def serve(nbytes: int, how: str) -> None:
    """The sender's process: serves one version until its input ends."""
    manifest, buffer = make(nbytes)
    with WeightServer(encrypt=how == "curve", local=how == "neighbour") as source:
        address = source.publish(manifest, buffer)
        began = time.process_time()
        print(
            json.dumps(
                {
                    "manifest": manifests.encode(manifest).hex(),
                    "source": msgspec.msgpack.encode(address).hex(),
                }
            ),
            flush=True,
        )
        sys.stdin.read()
        print(json.dumps({"sender_cpu": time.process_time() - began}), flush=True)


def receive(streams: int) -> None:
    """The receiver's process: reads what to pull from its input, pulls, tells how long it took and what memory it needed."""
    message = json.loads(sys.stdin.readline())
    manifest = manifests.decode(bytes.fromhex(message["manifest"]))
    address = msgspec.msgpack.decode(bytes.fromhex(message["source"]), type=messages.WeightSource)
    memory: Buffer | None = None
    found: dict[str, float] = {}
    for name in ("first", "next"):  # the next one writes where the last one but one was, as an engine does
        began, cpu = time.monotonic(), time.process_time()
        memory = asyncio.run(_pull(manifest, address, streams, memory))
        found |= {name: time.monotonic() - began, f"{name}_cpu": time.process_time() - cpu}
    print(json.dumps(found | {"above": peak_nbytes() - manifest.total_nbytes}))


async def _pull(
    manifest: manifests.Manifest, address: messages.WeightSource, streams: int, memory: Buffer | None
) -> Buffer:
    work = Pull(manifest, keys.generate(), limits=TransferLimits(streams=streams), buffer=memory)
    work.offer([address])
    return await work.finish(300.0)


def peak_nbytes() -> int:
    """The most memory this process ever had, shared memory included."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))


def one_receiver(nbytes: int, how: str, streams: int) -> dict[str, float]:
    me = [sys.executable, __file__]
    serving = [*me, "--serve", how, "--nbytes", str(nbytes)]
    with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        line = sender.stdout.readline()
        done = subprocess.run(
            [*me, "--receive", "--streams", str(streams)],
            input=line,
            capture_output=True,
            text=True,
            check=True,
        )
        message, _ = sender.communicate("")
    found: dict[str, float] = json.loads(done.stdout) | json.loads(message)
    return found


def iperf(streams: int, seconds: float = 3.0) -> tuple[float, float]:
    """Bytes a second over loopback, and CPU seconds a GB of the busier end; 0 where iperf3 is missing."""
    if shutil.which("iperf3") is None:
        return 0.0, 0.0
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(["iperf3", "-s", "-p", port], stdout=subprocess.DEVNULL)
    try:
        for _ in range(50):
            client = ["iperf3", "-c", "127.0.0.1", "-p", port, "-P", str(streams), "-t", f"{seconds:g}", "-J"]
            done = subprocess.run(
                client, capture_output=True, text=True, check=False, timeout=30 + 3 * seconds
            )
            found = json.loads(done.stdout)
            if "sum_received" in found["end"]:  # it also ends well when nobody listens yet
                break
            time.sleep(0.1)  # between two tries: iperf3 does not say when it listens
        else:
            sys.exit(f"iperf3: {found.get('error')}")
    finally:
        server.terminate()
        server.wait()
    end = found["end"]
    busy = (
        max(end["cpu_utilization_percent"]["host_total"], end["cpu_utilization_percent"]["remote_total"])
        / 100
    )
    return end["sum_received"]["bits_per_second"] / 8, busy * end["sum_sent"]["seconds"] / (
        end["sum_received"]["bytes"] / 1e9
    )


def show_pull(nbytes: int, streams: int, rounds: int) -> None:
    print(
        f"\none receiver, {nbytes / 1e9:.2f} GB over loopback, {streams} streams, hash check included, {rounds} rounds"
    )
    print(
        "CPU: seconds a GB of the busier end, which tells on a machine with other work what a quiet one would show as time"
    )
    print(
        f"{'transport':10} {'memory':>7} {'GB/s':>6} {'of iperf3':>10} {'CPU':>6} {'of iperf3':>10} {'MB above the model':>19}"
    )
    for how in ("tcp", "curve", "neighbour"):
        yards, runs = [iperf(streams)], []
        for _ in range(rounds):
            runs.append(one_receiver(nbytes, how, streams))
            yards.append(iperf(streams))
        yard, yard_cpu = (statistics.median(values) for values in zip(*yards, strict=True))
        for name, memory in (("first", "new"), ("next", "used")):
            rate = nbytes / statistics.median(run[name] for run in runs)
            cpu = statistics.median(max(run[f"{name}_cpu"], run["sender_cpu"] / 2) for run in runs) / (
                nbytes / 1e9
            )
            share, cpu_share = (
                (f"{rate / yard:10.0%}", f"{yard_cpu / cpu:10.0%}") if yard else ("         -", "         -")
            )
            above = max(run["above"] for run in runs) / 1e6
            print(
                f"{how:10} {memory:>7} {rate / 1e9:6.2f} {share} {cpu:6.2f} {cpu_share} {above:19.0f}",
                flush=True,
            )


# ---------------------------------------------------------------- late joiners


def joiners(count: int, nbytes: int, nbytes_per_s: float, *, relay: bool) -> float:
    """Seconds until `count` receivers that begin together have the version; every sender gives at most `nbytes_per_s`."""
    manifest, buffer = make(nbytes)
    limits = TransferLimits(streams=2)
    publisher = WeightServer(local=False, nbytes_per_s=nbytes_per_s)
    engines = [WeightServer(local=False, nbytes_per_s=nbytes_per_s) for _ in range(count if relay else 0)]
    try:
        root = publisher.publish(manifest, buffer)
        works = [Pull(manifest, keys.generate(), limits=limits, seed=i) for i in range(count)]
        addresses = []
        for engine, work in zip(engines, works, strict=False):
            addresses.append(engine.publish_empty(manifest, work.buffer))
            work.arrived = _announcer(engine, manifest.version)
        began = time.monotonic()
        for i, work in enumerate(works):
            peers = (
                [addresses[(i + hop) % count] for hop in (1, 2, 4, 7, 11, 14)[: count - 1]] if relay else []
            )
            work.offer([root, *dict.fromkeys(peers)])

        async def all_of_them() -> None:
            await asyncio.gather(*(work.finish(600.0) for work in works))

        asyncio.run(all_of_them())
        return time.monotonic() - began
    finally:
        for source in (publisher, *engines):
            source.close()


def _announcer(source: WeightServer, version: int) -> Callable[[int], None]:
    return lambda chunk: source.arrived(version, chunk)


def show_relay(nbytes: int, nbytes_per_s: float, count: int) -> None:
    print(
        f"\n{count} late joiners of {nbytes / 1e6:.0f} MB, each sender at {nbytes_per_s / 1e6:.0f} MB/s (a token bucket)"
    )
    one = joiners(1, nbytes, nbytes_per_s, relay=False)
    print(f"one joiner           {one:7.1f} s")
    for relay in (True, False):
        some = joiners(count, nbytes, nbytes_per_s, relay=relay)
        how = "with relay   " if relay else "without relay"
        print(f"{count} {how}     {some:7.1f} s = {some / one:.1f}x of one", flush=True)


# ---------------------------------------------------------------- command


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="pull,relay,delta,publish", help="of pull, relay, delta, publish and join"
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--joiners", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=64.0, help="of the version that joiners pull")
    parser.add_argument("--rate", type=float, default=12.0, help="MB/s of each sender")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the decoder that is published")
    parser.add_argument("--ledger", default="", help="of a demo that ran; without it one is run for `join`")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nbytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.nbytes, options.serve)
    elif options.receive:
        receive(options.streams)
    else:
        parts = options.only.split(",")
        if "pull" in parts:
            show_pull(int(options.gigabytes * 1e9) // MIB * MIB, options.streams, options.rounds)
        if "delta" in parts or "publish" in parts or "join" in parts:
            # A script's own folder stands first on the path, and there benchmarks/trainer.py would hide the package of that name.
            sys.path.append(sys.path.pop(0))
            sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
            from benchmarks import weights_steps as steps  # torch

            if "delta" in parts:
                steps.show_deltas()
            if "publish" in parts:
                steps.show_publish(options.hidden, 12, options.rounds)
            if "join" in parts:
                steps.show_joins(options.ledger)
        if "relay" in parts:
            show_relay(int(options.megabytes * 1e6) // MIB * MIB, options.rate * 1e6, options.joiners)


if __name__ == "__main__":
    main()
