"""Weights in seconds, before and after in one run: whole or as deltas, waiting for deltas, pulled ahead, applied and merged.

    python benchmarks/weights_time.py [--mib 32] [--repeats 5] [--only choice,waiting,ahead,apply,merge]

Each line has the median and the range of all repeats, which alternate between before and after, and the ratio of the medians. *Before* is
what was done until deltas were chosen by time: a delta wherever it is at most 0.9 of the chunk's bytes (`choice`), whole chunks for who
asks while deltas are being made (`waiting`), every byte after the order to load (`ahead`), one core (`apply`, `merge`). Links are sources
that send so much a second over loopback; the versions are bfloat16 casts of float32 masters before and after an update of Adam's size.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

# A script's own folder stands first on the path, and there some files would hide packages of their names: so imports follow (E402).
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place).resolve() != HERE)]

import numpy as np  # noqa: E402
import structlog  # noqa: E402
import torch  # noqa: E402

from rollout.engines import lora  # noqa: E402
from rollout.engines.device_delta import DeviceApply  # noqa: E402
from scavenger.protocol import keys, messages  # noqa: E402
from scavenger.weights import delta  # noqa: E402
from scavenger.weights import manifest as manifests  # noqa: E402
from scavenger.weights import pull as pulls  # noqa: E402
from scavenger.weights.choice import MeasuredRate, RateBook  # noqa: E402
from scavenger.weights.engine_store import Store  # noqa: E402
from scavenger.weights.manifest import Manifest  # noqa: E402
from scavenger.weights.memory import Buffer  # noqa: E402
from scavenger.weights.source import WeightServer  # noqa: E402

MB, MIB = 1e6, 1 << 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CORES = len(os.sched_getaffinity(0))
Version = tuple[Manifest, Buffer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=32, help="of a version")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="choice,waiting,ahead,apply,merge")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    print(f"on {CORES} cores, {gpu}; {asked.mib} MiB, {asked.repeats} repeats, before and after in turn")
    for name in asked.only.split(","):
        PARTS[name](asked.mib * MIB, asked.repeats)


def compared(name: str, repeats: int, before: Callable[[], float], after: Callable[[], float]) -> None:
    """Print one line. Each gives seconds."""
    was, now = [], []
    for _ in range(repeats):
        was.append(before())
        now.append(after())

    def told(seconds: list[float]) -> str:
        return f"{statistics.median(seconds):.3g} s [{min(seconds):.3g}, {max(seconds):.3g}]"

    ratio = statistics.median(was) / statistics.median(now)
    print(f"{name}: before {told(was)}, after {told(now)}, ratio {ratio:.2f}", flush=True)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


# ---------------------------------------------------------------- versions and pulls


def versions(nbytes: int, lr: float) -> tuple[Version, Version]:
    rng = np.random.default_rng(0)
    masters = torch.from_numpy(rng.standard_normal(nbytes // 2, dtype=np.float32)).mul_(0.02)
    moved = torch.from_numpy(rng.standard_normal(nbytes // 2, dtype=np.float32)).clamp_(-1, 1)
    return version(1, masters), version(2, masters + lr * moved)


def version(number: int, values: torch.Tensor) -> Version:
    raw: Any = values.bfloat16().view(torch.uint8).numpy()
    manifest, blob = manifests.build(number, {"w": ("bfloat16", (len(values),), memoryview(raw))})
    buffer = Buffer(len(blob))
    buffer.view[:] = blob
    return manifest, buffer


def book(link: float = 0.0) -> RateBook:
    """What an engine knows that pulled before; `link`: nothing but that its connections carry so much, and that it will not unlearn."""
    if not link:
        return RateBook()
    return RateBook(connections={"127.0.0.1": MeasuredRate(link, link * 1e12, 1e12, 1)})


def pulled(target: Version, address: messages.WeightSource, base: Version | None, rates: RateBook) -> float:
    """Seconds until all of it is here, verified."""

    async def run() -> None:
        work.offer([address])
        await work.finish(300.0)

    work = pulls.Pull(target[0], keys.generate(), base=base, rates=rates)
    seconds = timed(lambda: asyncio.run(run()))
    if work.buffer.view != target[1].view:
        raise ValueError("other bytes came than were published")
    return seconds


def pulled_as_deltas(target: Version, address: messages.WeightSource, base: Version) -> float:
    """The same with deltas wherever there are some: a link of a byte a second that is not unlearned."""
    return pulled(target, address, base, book(1.0))


def choice(nbytes: int, repeats: int) -> None:
    """Before: deltas always. After: by what the pull before it measured. All deltas are made by then."""
    old, new = versions(nbytes, 1e-5)
    for link in (12.5 * MB, 125 * MB, 0.0):
        with WeightServer(local=False, deltas=4, nbytes_per_s=link) as source:
            first = source.publish(*old)
            rates = book()
            pulled(old, first, None, rates)  # measures the link
            second = source.publish(*new)
            source.wait_deltas()
            pulled(new, second, old, book(1.0))  # the first deltas: everybody's caches are warm
            for _ in range(2):
                pulled(new, second, old, rates)
            name = f"choice, link {link / MB:g} MB/s" if link else "choice, loopback, no bound"
            compared(
                name,
                repeats,
                partial(pulled_as_deltas, new, second, old),
                partial(pulled, new, second, old, rates),
            )


def waiting(nbytes: int, repeats: int) -> None:
    """An engine that asks as the version is published. Before: at once, and most comes whole. After: it waits where that is quicker."""
    old, new = versions(nbytes, 1e-5)

    def turn(link: float, most_wait_s: float) -> float:
        pulls.MOST_WAIT_S = most_wait_s
        with WeightServer(local=False, deltas=4, nbytes_per_s=link) as source:
            source.publish(*old)
            return pulled(new, source.publish(*new), old, book(link / 4))

    most_wait_s = pulls.MOST_WAIT_S
    for link in (2.5 * MB, 12.5 * MB):
        compared(
            f"waiting, link {link / MB:g} MB/s",
            repeats,
            partial(turn, link, 0.0),
            partial(turn, link, most_wait_s),
        )


def ahead(nbytes: int, repeats: int) -> None:
    """From the order to load until the bytes are here: within the pause. Before: pulled then. After: pulled while it generated."""
    manifest, buffer = versions(nbytes, 1e-5)[0]

    def turn(early: bool) -> float:
        async def run() -> float:
            with WeightServer(local=False, nbytes_per_s=125 * MB) as source:
                order = messages.UseWeights(1, b"", (source.publish(manifest, buffer),))
                store = Store(keys.generate(), lambda _: None, lambda: "127.0.0.1")
                try:
                    if early:
                        await store.get(manifest, order, 300.0)
                    began = time.perf_counter()
                    await store.get(manifest, order, 300.0)
                    return time.perf_counter() - began
                finally:
                    store.close()

        return asyncio.run(run())

    compared("ahead, link 125 MB/s, bytes in the pause", repeats, lambda: turn(False), lambda: turn(True))


# ---------------------------------------------------------------- applying and merging


def apply(nbytes: int, repeats: int) -> None:
    """Before: one core. After: as many as there are, as a pull's connections do; and by torch on the engine's device."""
    for lr in (1e-6, 1e-5):
        _applied(nbytes, repeats, lr)


def _applied(nbytes: int, repeats: int, lr: float) -> None:
    (of, old), (_, new) = versions(nbytes, lr)
    cuts = [of.chunk_range(chunk) for chunk in range(len(of.chunk_hashes))]
    made = [memoryview(delta.chain([delta.encode(old.view[a:b], new.view[a:b], 2)])) for a, b in cuts]
    into = memoryview(bytearray(nbytes))

    def on(function: Callable[..., None], threads: int) -> float:
        def one(chunk: int) -> None:
            a, b = cuts[chunk]
            function(old.view[a:b], made[chunk], into[a:b])

        with ThreadPoolExecutor(threads) as pool:
            seconds = timed(lambda: list(pool.map(one, range(len(cuts)))))
        if into != new.view:
            raise ValueError("applying the deltas did not give the new version")
        return seconds

    def alone() -> float:
        return on(delta.apply_chain, 1)

    there = DeviceApply(DEVICE)
    compared(f"apply, lr {lr:g}, {CORES} cores", repeats, alone, lambda: on(delta.apply_chain, CORES))
    compared(
        f"apply, lr {lr:g}, torch on {DEVICE}, {CORES} threads", repeats, alone, lambda: on(there, CORES)
    )


def merge(nbytes: int, repeats: int) -> None:
    """W0 + scale B A of a layer of so many bytes in bfloat16, rank 16. Before: one core. After: all, and the engine's device."""
    rows = nbytes // (2 * 4096)
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(rows, 4096, generator=generator).mul_(0.02).bfloat16()
    down, up = (torch.randn(*size, generator=generator) for size in ((16, 4096), (rows, 16)))
    given, threads = [value.to(DEVICE) for value in (base, down, up)], torch.get_num_threads()
    whole = lora.merged(base, down, up, 2.0)

    def on(parts: list[torch.Tensor], count: int) -> float:
        torch.set_num_threads(count)
        found: list[torch.Tensor] = []
        seconds = timed(lambda: found.append(lora.merged(parts[0], parts[1], parts[2], 2.0)))
        torch.set_num_threads(threads)
        if not torch.equal(found[0].cpu(), whole):
            raise ValueError("other bits")
        return seconds

    here = [base, down, up]
    compared(f"merge, {CORES} cores", repeats, lambda: on(here, 1), lambda: on(here, CORES))
    if DEVICE == "cuda":
        compared(f"merge, on {DEVICE}", repeats, lambda: on(here, 1), lambda: on(given, CORES))


PARTS: dict[str, Callable[[int, int], None]] = {
    "choice": choice,
    "waiting": waiting,
    "ahead": ahead,
    "apply": apply,
    "merge": merge,
}

if __name__ == "__main__":
    main()
