"""Memory of the daemon's core and payload store, a sample in flight: what the formula in docs/architecture.md is made of.

    python benchmarks/router_memory.py [samples]

256,000 samples, 16 a group, prompts of 256 tokens, on 1,000 engines by default. Resident memory, read from the kernel after each stage; the
ledger's writer and its backlog are not in it.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

from scavenger.protocol.messages import (
    PROTOCOL,
    Call,
    CallBody,
    Chunk,
    Chunks,
    EngineSpec,
    GroupSpec,
    OpenRun,
    PublishVersion,
    Sampling,
    SubmitGroups,
    WeightsLoaded,
    WeightSource,
    WorkerHello,
    pack_logprobs,
    pack_tokens,
)
from scavenger.router.core.events import (
    Committed,
    HelloReceived,
    HistoryRead,
    PeerIdentity,
    ReadHistory,
    RouterEvent,
    TrainerCalled,
    Write,
)
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import FLAT_BYTES, PayloadStore
from scavenger.router.core.state import RouterLimits
from scavenger.router.edge.pipeline import checked

N, ENGINES, PROMPT, CHUNK = 16, 1000, 256, 32
OWNER = PeerIdentity("owner", "k")


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Site:
    def __init__(self, bound: int) -> None:
        self.store = PayloadStore(bound)
        self.router = Router(RouterLimits(), 1, self.store)
        self.ticket = self.calls = 0

    def handle(self, event: RouterEvent) -> None:
        for action in self.router.handle(event, 1000.0):
            if isinstance(action, Write):
                self.ticket = action.ticket
            elif isinstance(action, ReadHistory):
                self.handle(HistoryRead(action.run_id, action.attempt, ()))

    def commit(self) -> None:
        while self.router.core.uncommitted:
            self.handle(Committed(self.ticket))

    def call(self, body: CallBody) -> None:
        self.calls += 1
        self.handle(
            TrainerCalled(1, OWNER, Call(self.calls, "r", 0 if isinstance(body, OpenRun) else 1, body))
        )
        self.commit()


def measure(samples: int) -> None:
    site = Site(8 * 2**30)
    spec = EngineSpec("reference", "{}", "float32", -(-samples // ENGINES), 8192)
    site.call(OpenRun(PROTOCOL, "r", 0, "{}", spec, "", True, ENGINES, 1, 0, "h", 1))
    site.call(PublishVersion(1, 0, b"root", b"m", (WeightSource("e", "k", b"t"),)))
    for i in range(ENGINES):
        hello = WorkerHello(PROTOCOL, "harvested", "r", f"s{i}", 0, i, f"n{i}", 1, "reference", "0", 1)
        site.handle(HelloReceived(100 + i, PeerIdentity("worker", f"k{i}", "r", f"i{i}"), hello))
        site.handle(checked(100 + i, WeightsLoaded(1, b"root")))
        site.commit()
    base = resident()
    print(f"base, with {ENGINES} engines: {base / 2**20:,.0f} MiB")
    prompt = pack_tokens(range(PROMPT))
    for first in range(0, samples // N, 500):
        wanted = range(first, min(first + 500, samples // N))
        site.call(
            SubmitGroups(
                1,
                1,
                "train",
                tuple(GroupSpec(i, prompt[:-4] + pack_tokens([i]), N, Sampling(4096)) for i in wanted),
            )
        )
    assert sum(len(w.leases) for w in site.router.core.workers.values()) == samples
    leased = resident()
    each = (leased - base) / samples
    print(
        f"{samples:,} samples leased: {leased / 2**20:,.0f} MiB, {each:,.0f} bytes a sample (its share of group and prompt included)"
    )
    tokens, logprobs = pack_tokens(range(CHUNK)), pack_logprobs([-1.0] * CHUNK)
    flushes, started = 4, time.perf_counter()
    for offset in range(0, CHUNK * flushes, CHUNK):
        for worker in site.router.core.workers.values():
            assert worker.conn is not None
            chunks = (
                Chunk(s.id, s.epoch, offset, 1, tokens, logprobs, logprobs) for s in worker.leases.values()
            )
            site.handle(checked(worker.conn, Chunks(tuple(chunks))))
            site.commit()
    took = time.perf_counter() - started
    kept = resident() - leased
    counted = site.store.nbytes
    print(
        f"{CHUNK * flushes} tokens of each: {kept / 2**20:,.0f} MiB more, the store counts {counted / 2**20:,.0f} MiB"
    )
    flat = (kept - 12 * 9 / 8 * CHUNK * flushes * samples) / samples
    print(
        f"  so {flat:,.0f} bytes a kept sample besides its tokens and an eighth of them; FLAT_BYTES is {FLAT_BYTES}"
    )
    print(f"  {samples * flushes / took:,.0f} chunks/s")


if __name__ == "__main__":
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else 256_000)
