"""A version that several training ranks serve together: each has some of its chunks, and nobody all."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence

import pytest

from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights import protocol
from scavenger.weights import pull as pulls
from scavenger.weights.manifest import Manifest, Shard
from scavenger.weights.memory import Buffer, MemoryPool
from scavenger.weights.protocol import Get
from scavenger.weights.pull import Pull
from scavenger.weights.source import WeightServer
from scavenger.weights.transfer import TransferLimits
from scavenger.weights.version_store import RETIRED_LEASES

QUICK = TransferLimits(window=4, stall_s=0.3, backoff_s=0.01, backoff_max_s=0.05)
CHUNK = 4096


def shared(number: int, ranks: int, chunks: int = 120) -> tuple[Manifest, memoryview]:
    """A version whose chunks the ranks have in equal runs."""
    blob = memoryview(os.urandom(chunks * CHUNK))
    table = manifests.layout({"w": ("bfloat16", (len(blob) // 2,))})
    each = chunks // ranks * CHUNK
    cuts = [rank * each for rank in range(ranks)] + [len(blob)]
    shards = tuple(Shard(rank, cuts[rank], cuts[rank + 1]) for rank in range(ranks))
    return manifests.seal(
        number, table, manifests.hashes_of(blob, CHUNK), chunk_nbytes=CHUNK, shards=shards
    ), blob


def of_rank(manifest: Manifest, blob: memoryview, rank: int) -> tuple[Buffer, list[int]]:
    """What a rank has: the other bytes are holes."""
    shard, buffer = manifest.shards[rank], Buffer(manifest.total_nbytes)
    buffer.view[shard.start : shard.stop] = blob[shard.start : shard.stop]
    return buffer, list(range(shard.start // CHUNK, shard.stop // CHUNK))


@contextlib.contextmanager
def sources(
    manifest: Manifest, blob: memoryview, *, encrypt: bool = False, local: bool = False
) -> Iterator[list[WeightServer]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(WeightServer(encrypt=encrypt, local=local)) for _ in manifest.shards]


def published(
    manifest: Manifest, blob: memoryview, ranks: Sequence[WeightServer]
) -> list[messages.WeightSource]:
    return [source.publish(manifest, *of_rank(manifest, blob, rank)) for rank, source in enumerate(ranks)]


def pulled(
    manifest: Manifest, given: Sequence[messages.WeightSource], deadline_s: float = 20.0
) -> memoryview:
    work = Pull(manifest, keys.generate(), limits=QUICK)
    work.offer(given)
    return asyncio.run(work.finish(deadline_s)).view


def lacking(work: Pull, arrived: int) -> str:
    """What a pull says once so many chunks are here and no more come."""

    async def main() -> str:
        going = asyncio.create_task(work.finish(60.0))
        async with asyncio.timeout(60.0):
            while len(work.here()) < arrived:
                await asyncio.sleep(0.01)  # polls a condition
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        assert len(work.here()) == arrived
        return work._summary()

    return asyncio.run(main())


@pytest.mark.parametrize(("encrypt", "local"), [(False, False), (True, False), (False, True)])
def test_each_chunk_comes_from_the_rank_that_has_it(encrypt: bool, local: bool) -> None:
    manifest, blob = shared(1, ranks=3)
    with sources(manifest, blob, encrypt=encrypt, local=local) as ranks:
        given = published(manifest, blob, ranks)
        assert not any(one.complete for one in given)
        assert pulled(manifest, given) == blob
        assert [rank.stats.refused for rank in ranks] == [0, 0, 0]
        if not local:
            assert [rank.stats.parts for rank in ranks] == [40, 40, 40], "nothing is sent twice, and no hole"


def test_more_ranks_than_connections_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "MAX_SOURCES", 3)
    manifest, blob = shared(1, ranks=20)
    with sources(manifest, blob) as ranks:
        given = published(manifest, blob, ranks)
        assert pulled(manifest, given) == blob
        for gone in (4, 5, 6, 7):  # as many as there are places, and more
            ranks[gone].close()
        work = Pull(manifest, keys.generate(), limits=QUICK)
        work.offer(given)
        assert (
            "6 of rank 4 missing, 6 of rank 5 missing, 6 of rank 6 missing, 6 of rank 7 missing"
            in lacking(work, 96)
        )
        with WeightServer(local=False) as engine:
            relay = engine.publish(manifest, blob)
            assert pulled(manifest, [*given, relay]) == blob
            assert engine.stats.parts >= 24


def test_an_engine_pulls_from_more_than_256_ranks() -> None:
    """Each has two chunks, and 16 connections are open at a time."""
    manifest, blob = shared(1, ranks=300, chunks=600)
    with sources(manifest, blob) as ranks:
        assert pulled(manifest, published(manifest, blob, ranks), 60.0) == blob
        assert {rank.stats.parts for rank in ranks} == {2}


def test_a_dead_rank_s_chunks_come_from_an_engine_that_has_some_of_them_and_its_successor_has_the_rest() -> (
    None
):
    manifest, blob = shared(1, ranks=2)
    with (
        sources(manifest, blob) as ranks,
        WeightServer(local=False) as engine,
        WeightServer(local=False) as successor,
    ):
        given = published(manifest, blob, ranks)
        buffer, _ = of_rank(manifest, blob, 1)
        relay = engine.publish_empty(manifest, buffer)
        for chunk in range(60, 90):
            engine.arrived(1, chunk)
        ranks[1].close()
        work = Pull(manifest, keys.generate(), limits=QUICK)
        work.offer([*given, relay])
        assert "90 of 120 chunks arrived, 30 of rank 1 missing" in lacking(work, 90)
        work.again()
        work.offer([successor.publish(manifest, *of_rank(manifest, blob, 1))])
        assert asyncio.run(work.finish(10.0)).view == blob
        assert successor.stats.parts == 30, "what had come stayed"


def test_memory_is_written_again_only_when_its_readers_lease_has_run_out() -> None:
    now = 0.0
    manifest, blob = shared(1, ranks=2)
    pool = MemoryPool()
    with WeightServer(local=False, keep=1, lease_s=15.0) as source:
        store = source._store
        store._clock = lambda: now
        buffer, chunks = of_rank(manifest, blob, 0)
        token = source.publish(manifest, buffer, chunks).token
        pool.put_back(buffer)
        ask = protocol.decode_request(protocol.get(token, 1, 0))
        assert isinstance(ask, Get)
        assert store.reply(ask, "reader")[1] is not None
        second, more = shared(2, ranks=2)
        source.publish(
            second, *of_rank(second, more, 0)
        )  # the first one leaves the shelf, and its reader reads on
        now = 10.0
        assert pool.take(manifest.total_nbytes) is not buffer
        assert store.reply(ask, "reader")[1] == blob[:CHUNK]
        now = 24.0
        assert pool.take(manifest.total_nbytes) is not buffer, "it asked again, so its lease is longer"
        now = 25.1
        assert source.versions() == [2]
        assert source.free(1, 0.0)
        assert pool.take(manifest.total_nbytes) is buffer


@pytest.mark.parametrize(
    ("nbytes_per_s", "anew", "whole"), [(1.1e6, True, True), (0.5e6, True, False), (1.1e6, False, False)]
)
def test_a_reader_of_a_retired_version_has_all_of_it_if_it_reads_fast_enough(
    nbytes_per_s: float, anew: bool, whole: bool
) -> None:
    """`anew`: each chunk is another one."""
    now, lease_s = 0.0, 0.01
    with WeightServer(local=False, keep=1, lease_s=lease_s) as source:
        source._store._clock = lambda: now
        manifest, blob = shared(1, ranks=1)
        token = source.publish(manifest, blob).token

        def read(chunk: int) -> bool:
            request = protocol.decode_request(protocol.get(token, 1, chunk))
            return source._store.reply(request, "reader")[1] is not None

        assert read(0)
        source.publish(*shared(2, ranks=1))
        got = 0
        while got < len(manifest.chunk_hashes) and read(got if anew else 0):
            got, now = got + 1, now + CHUNK / nbytes_per_s
        assert (got == len(manifest.chunk_hashes)) is whole
        if not whole:
            assert now == pytest.approx(RETIRED_LEASES * lease_s, abs=2 * CHUNK / nbytes_per_s)


def test_readers_that_never_end_keep_no_more_than_two_retired_versions_and_none_for_long() -> None:
    now, lease_s = 0.0, 15.0
    with WeightServer(local=False, keep=2, lease_s=lease_s) as source:
        store = source._store
        store._clock = lambda: now
        tokens = {}

        def read(number: int) -> bool:
            request = protocol.decode_request(protocol.get(tokens[number], number, 0))
            return store.reply(request, "reader")[1] is not None

        for number in range(1, 9):
            manifest, blob = shared(number, ranks=1)
            tokens[number] = source.publish(manifest, blob).token
            now += 5.0
            assert [one for one in tokens if read(one)] == list(range(max(1, number - 3), number + 1))
        assert list(store._versions) == [5, 6, 7, 8]
        retired_at = now - 5.0  # version 6, when version 8 was published
        while read(6):
            now += 1.0
            assert now - retired_at <= RETIRED_LEASES * lease_s
        assert now - retired_at == RETIRED_LEASES * lease_s, "one that began before had the time for its pull"
        assert source.free(6, 0.0)
        assert list(store._versions) == [7, 8]
