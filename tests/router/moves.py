"""What many tests of the core begin with."""

from __future__ import annotations

from scavenger.protocol.messages import Chunk, Chunks, GroupDone, Lease, Ok, Revoke
from tests.router.harness import Bench, started

W1, W2 = 11, 12


def one_lease(**options: object) -> tuple[Bench, Lease]:
    """A bench with one sample of 8 tokens, leased to W1."""
    bench = started(n=1, **options)  # type: ignore[arg-type]
    (lease,) = bench.join(W1)
    return bench, lease


def finish_all(bench: Bench, conn: int, leases: list[Lease]) -> None:
    for lease in leases:
        bench.chunk(conn, lease, len(lease.accepted) // 4, 8 - len(lease.accepted) // 4, "length")


def refused(bench: Bench, conn: int, chunk: Chunk, reason: str) -> None:
    """The chunk changes nothing, is counted, is written down with its reason, and its worker is told to drop the lease."""
    accepted = {i: s.accepted for i, s in bench.router.core.samples.items()}
    before = len(bench.events("chunk_refused"))
    bench.say(conn, Chunks((chunk,)))
    assert {i: s.accepted for i, s in bench.router.core.samples.items()} == accepted
    assert reason in bench.events("chunk_refused")[before].reason
    assert bench.router.core.counters["chunk_refused"] == before + 1
    assert (chunk.sample_id, chunk.epoch) in bench.take(conn, Revoke)[0].leases


def consumed_step(**options: object) -> Bench:
    """Step 1 was consumed, no checkpoint covers it."""
    bench = started(**options)  # type: ignore[arg-type]
    finish_all(bench, W1, bench.join(W1))
    assert isinstance(bench.commit_step(1, [1, 2]), Ok)
    bench.take(1, GroupDone)
    return bench
