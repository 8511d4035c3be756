"""The weights plane against its goals: one receiver beside iperf3, sixteen late joiners, what publishing costs a step, deltas.

    python benchmarks/weights.py [--only pull,relay] [--gigabytes 2] [--streams 4]

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
from typing import Any

import msgspec
import numpy as np

from scavenger import keys, wire
from scavenger.weights import delta
from scavenger.weights import manifest as manifests
from scavenger.weights.memory import Buffer
from scavenger.weights.pull import Pull
from scavenger.weights.source import WeightSource
from scavenger.weights.transfer import Limits

MIB = 1 << 20


def make(nbytes: int, version: int = 1) -> tuple[manifests.Manifest, Buffer]:
    """A version of one tensor, its bytes not all alike."""
    nbytes = nbytes // MIB * MIB
    buffer = Buffer(nbytes)
    buffer.prepare(nbytes)
    block = np.random.default_rng(version).integers(0, 256, MIB, dtype=np.uint8)
    for start in range(0, nbytes, MIB):
        block[:8] = np.frombuffer(start.to_bytes(8, "little"), dtype=np.uint8)
        buffer.view[start : start + MIB] = memoryview(block)
    table = manifests.layout({"w": ("bfloat16", (nbytes // 2,))})
    size = manifests.chunk_nbytes_of(nbytes)
    return manifests.seal(version, table, manifests.hashes_of(buffer.view, size), chunk_nbytes=size), buffer


# ---------------------------------------------------------------- one receiver


def serve(nbytes: int, how: str) -> None:
    """The sender's process: serves one version until its input ends."""
    manifest, buffer = make(nbytes)
    with WeightSource(encrypt=how == "curve", local=how == "neighbour") as source:
        address = source.publish(manifest, buffer)
        began = time.process_time()
        print(json.dumps({"manifest": manifests.encode(manifest).hex(), "source": msgspec.msgpack.encode(address).hex()}), flush=True)
        sys.stdin.read()
        print(json.dumps({"sender_cpu": time.process_time() - began}), flush=True)


def receive(streams: int) -> None:
    """The receiver's process: reads what to pull from its input, pulls, tells how long it took and what memory it needed."""
    told = json.loads(sys.stdin.readline())
    manifest = manifests.decode(bytes.fromhex(told["manifest"]))
    address = msgspec.msgpack.decode(bytes.fromhex(told["source"]), type=wire.WeightSource)
    memory: Buffer | None = None
    found = {}
    for name in ("first", "next"):  # the next one writes where the last one but one was, as an engine does
        began, cpu = time.monotonic(), time.process_time()
        memory = asyncio.run(_pull(manifest, address, streams, memory))
        found |= {name: time.monotonic() - began, f"{name}_cpu": time.process_time() - cpu}
    print(json.dumps(found | {"above": peak_nbytes() - manifest.total_nbytes}))


async def _pull(manifest: manifests.Manifest, address: wire.WeightSource, streams: int, memory: Buffer | None) -> Buffer:
    work = Pull(manifest, keys.generate(), limits=Limits(streams=streams), buffer=memory)
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
        done = subprocess.run([*me, "--receive", "--streams", str(streams)], input=line, capture_output=True, text=True, check=True)
        told, _ = sender.communicate("")
    return json.loads(done.stdout) | json.loads(told)


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
            done = subprocess.run(client, capture_output=True, text=True, check=False, timeout=30 + 3 * seconds)
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
    busy = max(end["cpu_utilization_percent"]["host_total"], end["cpu_utilization_percent"]["remote_total"]) / 100
    return end["sum_received"]["bits_per_second"] / 8, busy * end["sum_sent"]["seconds"] / (end["sum_received"]["bytes"] / 1e9)


def show_pull(nbytes: int, streams: int, rounds: int) -> None:
    print(f"\none receiver, {nbytes / 1e9:.2f} GB over loopback, {streams} streams, hash check included, {rounds} rounds")
    print("CPU: seconds a GB of the busier end, which tells on a machine with other work what a quiet one would show as time")
    print(f"{'transport':10} {'memory':>7} {'GB/s':>6} {'of iperf3':>10} {'CPU':>6} {'of iperf3':>10} {'MB above the model':>19}")
    for how in ("tcp", "curve", "neighbour"):
        yards, runs = [iperf(streams)], []
        for _ in range(rounds):
            runs.append(one_receiver(nbytes, how, streams))
            yards.append(iperf(streams))
        yard, yard_cpu = (statistics.median(values) for values in zip(*yards, strict=True))
        for name, memory in (("first", "new"), ("next", "used")):
            rate = nbytes / statistics.median(run[name] for run in runs)
            cpu = statistics.median(max(run[f"{name}_cpu"], run["sender_cpu"] / 2) for run in runs) / (nbytes / 1e9)
            share, cpu_share = (f"{rate / yard:10.0%}", f"{yard_cpu / cpu:10.0%}") if yard else ("         -", "         -")
            above = max(run["above"] for run in runs) / 1e6
            print(f"{how:10} {memory:>7} {rate / 1e9:6.2f} {share} {cpu:6.2f} {cpu_share} {above:19.0f}", flush=True)


# ---------------------------------------------------------------- late joiners


def joiners(count: int, nbytes: int, nbytes_per_s: float, *, relay: bool) -> float:
    """Seconds until `count` receivers that begin together have the version; every sender gives at most `nbytes_per_s`."""
    manifest, buffer = make(nbytes)
    limits = Limits(streams=2)
    publisher = WeightSource(local=False, nbytes_per_s=nbytes_per_s)
    engines = [WeightSource(local=False, nbytes_per_s=nbytes_per_s) for _ in range(count if relay else 0)]
    try:
        root = publisher.publish(manifest, buffer)
        works = [Pull(manifest, keys.generate(), limits=limits, seed=i) for i in range(count)]
        addresses = []
        for engine, work in zip(engines, works, strict=False):
            addresses.append(engine.publish_empty(manifest, work.buffer))
            work.arrived = _tells(engine, manifest.version)
        began = time.monotonic()
        for i, work in enumerate(works):
            peers = [addresses[(i + hop) % count] for hop in (1, 2, 4, 7, 11, 14)[: count - 1]] if relay else []
            work.offer([root, *dict.fromkeys(peers)])

        async def all_of_them() -> None:
            await asyncio.gather(*(work.finish(600.0) for work in works))

        asyncio.run(all_of_them())
        return time.monotonic() - began
    finally:
        for source in (publisher, *engines):
            source.close()


def _tells(source: WeightSource, version: int) -> Callable[[int], None]:
    return lambda chunk: source.arrived(version, chunk)


def show_relay(nbytes: int, nbytes_per_s: float, count: int) -> None:
    print(f"\n{count} late joiners of {nbytes / 1e6:.0f} MB, each sender at {nbytes_per_s / 1e6:.0f} MB/s (a token bucket)")
    one = joiners(1, nbytes, nbytes_per_s, relay=False)
    print(f"one joiner           {one:7.1f} s")
    for relay in (True, False):
        some = joiners(count, nbytes, nbytes_per_s, relay=relay)
        how = "with relay   " if relay else "without relay"
        print(f"{count} {how}     {some:7.1f} s = {some / one:.1f}x of one", flush=True)


# ---------------------------------------------------------------- deltas

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)


def show_deltas(hidden: int, layers: int, vocabulary: int) -> None:
    """One policy-gradient step of a random-init decoder: fp32 masters, AdamW, published as bf16. The first step of Adam is its largest:
    every parameter with a gradient moves by the learning rate."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer import losses, tiny

    config = tiny.model_config(hidden, layers) | {"vocab_size": vocabulary}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tokens = torch.randint(0, vocabulary, (8, 48))
    current = losses.token_logprobs(model(input_ids=tokens[:, :-1]).logits.float(), tokens[:, 1:], 1.0)
    same, mask = current.detach(), torch.ones_like(current)
    loss = losses.policy_loss(current, same, same, torch.randn(8), mask, clip_low=0.2, clip_high=0.2, importance_cap=2.0).loss
    (loss / current.numel()).backward()
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    before = _cast(masters)
    count = sum(parameter.numel() for parameter in masters)
    print(f"\ndelta of one step, {count / 1e6:.1f} M parameters in bf16; all times on one thread")
    print(f"{'lr':>8} {'changed values':>15} {'bytes of full':>14} {'encode GB/s':>12} {'apply GB/s':>11}")
    for rate in RATES:
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0).step()
        _one_delta(rate, before, _cast([parameter.detach() for parameter in model.parameters()]))


def _cast(parameters: list[Any]) -> memoryview:
    import torch

    return memoryview(torch.cat([p.reshape(-1).to(torch.bfloat16) for p in parameters]).view(torch.uint8).numpy())


def _one_delta(rate: float, old: memoryview, new: memoryview) -> None:
    changed = np.count_nonzero(np.frombuffer(old, dtype="<u2") != np.frombuffer(new, dtype="<u2")) / (len(old) // 2)
    cuts = [(start, min(start + MIB, len(old))) for start in range(0, len(old), MIB)]
    began = time.monotonic()
    made = [delta.chain([delta.encode(old[a:b], new[a:b], 2)]) for a, b in cuts]
    encoded = time.monotonic()
    out = memoryview(bytearray(MIB))
    wrong = 0
    for (a, b), one in zip(cuts, made, strict=True):
        delta.apply_chain(old[a:b], memoryview(one), out[: b - a])
        wrong += out[: b - a] != new[a:b]
    applied = time.monotonic()
    assert not wrong
    share = sum(map(len, made)) / len(old)
    speeds = f"{len(old) / 1e9 / (encoded - began):12.2f} {len(old) / 1e9 / (applied - encoded):11.2f}"
    print(f"{rate:8.0e} {changed:15.1%} {share:14.1%} {speeds}", flush=True)


# ---------------------------------------------------------------- publishing


def show_publish(nbytes: int) -> None:
    """What `trainer.publish` does after the cast, part by part, on one thread; without it nothing would stand still."""
    tensor = np.random.default_rng(0).integers(0, 256, nbytes // MIB * MIB, dtype=np.uint8)
    parts: dict[str, float] = {}
    began = time.monotonic()
    buffer = Buffer(len(tensor))
    buffer.view[:] = memoryview(tensor)
    parts["copy into place"] = time.monotonic() - began
    began = time.monotonic()
    manifests.hashes_of(buffer.view, MIB)
    parts["hashes"] = time.monotonic() - began
    print(f"\npublishing {len(tensor) / 1e9:.2f} GB: " + ", ".join(f"{name} {len(tensor) / 1e9 / s:.2f} GB/s" for name, s in parts.items()))


# ---------------------------------------------------------------- command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="pull,relay,delta,publish")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--joiners", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=64.0, help="of the version that joiners pull")
    parser.add_argument("--rate", type=float, default=12.0, help="MB/s of each sender")
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
        if "delta" in parts:
            show_deltas(128, 4, 16)
            show_deltas(768, 12, 32_000)
        if "publish" in parts:
            show_publish(int(options.gigabytes * 1e9 / 4))
        if "relay" in parts:
            show_relay(int(options.megabytes * 1e6) // MIB * MIB, options.rate * 1e6, options.joiners)


if __name__ == "__main__":
    main()
