"""How many chunk events a second the router's core takes: 64 workers with 100 samples each, commits every 16 events.

    python benchmarks/router_core.py [chunks in a message ...]

Needs neither sockets nor a ledger: the core with its payload store and the check of values, on one thread.
"""

from __future__ import annotations

import sys
import time

from scavenger.protocol.messages import (
    PROTOCOL,
    Assign,
    Call,
    CallBody,
    Chunk,
    Chunks,
    EngineSpec,
    GroupSpec,
    Lease,
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
    Send,
    TrainerCalled,
    WorkerSent,
    Write,
)
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import PayloadStore
from scavenger.router.core.state import RouterLimits
from scavenger.router.edge.pipeline import checked

WORKERS, SAMPLES, TOKENS, CHUNK, COMMIT_EVERY = 64, 100, 64, 8, 16
OWNER = PeerIdentity("owner", "k")


class Site:
    """A core and the little that it needs around it."""

    def __init__(self) -> None:
        self.router = Router(RouterLimits(), 1, PayloadStore(512 * 2**20))
        self.ticket = self.calls = 0
        self.leases: dict[int, list[Lease]] = {}

    def handle(self, event: RouterEvent) -> None:
        for action in self.router.handle(event, 1000.0):
            if isinstance(action, Write):
                self.ticket = action.ticket
            elif isinstance(action, ReadHistory):
                self.handle(HistoryRead(action.run_id, action.attempt, ()))
            elif isinstance(action, Send) and isinstance(action.message, Assign):
                self.leases.setdefault(action.conn, []).extend(action.message.leases)

    def commit(self) -> None:
        while self.router.core.uncommitted:
            self.handle(Committed(self.ticket))

    def call(self, body: CallBody) -> None:
        self.calls += 1
        self.handle(
            TrainerCalled(1, OWNER, Call(self.calls, "r", 0 if isinstance(body, OpenRun) else 1, body))
        )
        self.commit()

    def fill(self) -> None:
        """Every worker holds `SAMPLES` leases."""
        spec = EngineSpec("reference", "{}", "float32", SAMPLES, 4096)
        self.call(OpenRun(PROTOCOL, "r", 0, "{}", spec, "", True, WORKERS, 1, 0, "h", 1))
        self.call(PublishVersion(1, 0, b"root", b"m", (WeightSource("e", "k", b"t"),)))
        prompt = pack_tokens(range(32))
        groups = tuple(GroupSpec(i, prompt, 8, Sampling(TOKENS)) for i in range(WORKERS * SAMPLES // 8))
        self.call(SubmitGroups(1, 1, "train", groups))
        for i in range(WORKERS):
            hello = WorkerHello(PROTOCOL, "harvested", "r", f"s{i}", 0, i, f"n{i}", 1, "reference", "0", 1)
            self.handle(HelloReceived(100 + i, PeerIdentity("worker", f"k{i}", "r", f"i{i}"), hello))
            self.handle(WorkerSent(100 + i, WeightsLoaded(1, b"root")))
            self.commit()


def measure(chunks_in_message: int) -> None:
    site = Site()
    site.fill()
    assert sum(map(len, site.leases.values())) == WORKERS * SAMPLES
    tokens, logprobs = pack_tokens(range(CHUNK)), pack_logprobs([-1.0] * CHUNK)
    messages = [
        (
            conn,
            Chunks(
                tuple(
                    Chunk(
                        x.sample_id,
                        x.epoch,
                        offset,
                        1,
                        tokens,
                        logprobs,
                        logprobs,
                        "length" if offset + CHUNK == TOKENS else None,
                    )
                    for x in leases[first : first + chunks_in_message]
                )
            ),
        )
        for offset in range(0, TOKENS, CHUNK)
        for first in range(0, SAMPLES, chunks_in_message)
        for conn, leases in list(site.leases.items())
    ]
    started = time.perf_counter()
    for n, (conn, message) in enumerate(messages, 1):
        site.handle(checked(conn, message))
        if n % COMMIT_EVERY == 0:
            site.commit()
    site.commit()
    took = time.perf_counter() - started
    chunks = WORKERS * SAMPLES * TOKENS // CHUNK
    assert site.router.core.counters["tokens_accepted"] == WORKERS * SAMPLES * TOKENS
    print(
        f"{chunks_in_message:4} chunks a message: {len(messages) / took:9,.0f} events/s, {chunks / took:9,.0f} chunks/s"
    )


if __name__ == "__main__":
    for size in [int(a) for a in sys.argv[1:]] or [1, 10, 100]:
        measure(size)
