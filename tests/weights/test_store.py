"""One engine's process: what it pulls it serves on, and what goes wrong elsewhere never makes it use a byte that it did not check."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from scavenger.errors import WeightsError
from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights.engine_store import Store
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from scavenger.weights.source import WeightServer
from scavenger.weights.spool import Spool
from scavenger.weights.transfer import TransferLimits
from tests.weights.cut import Cut
from tests.weights.pulling import link_of, parts_sent

LIMITS = TransferLimits(stall_s=0.5, backoff_s=0.01, backoff_max_s=0.05)


def version(number: int, seed: int | None = None, nbytes: int = 1 << 19) -> tuple[Manifest, memoryview]:
    data = os.urandom(nbytes) if seed is None else bytes([seed]) * nbytes
    return manifests.build(
        number, {"w": ("bfloat16", (nbytes // 2,), memoryview(data))}, chunk_nbytes=1 << 14
    )


class Engine:
    """A store, and what it said."""

    def __init__(self, announce_s: float = 0.5) -> None:
        self.said: list[messages.Serving] = []
        self.store = Store(
            keys.generate(), self.said.append, lambda: "127.0.0.1", limits=LIMITS, announce_s=announce_s
        )

    async def get(
        self,
        manifest: Manifest,
        *sources: messages.WeightSource,
        keep: tuple[int, ...] = (),
        deadline_s: float = 10.0,
        encrypt: bool = False,
    ) -> memoryview:
        weights = messages.UseWeights(manifest.version, b"m", sources, keep, encrypt=encrypt)
        return (await self.store.get(manifest, weights, deadline_s)).view

    def address(self) -> messages.WeightSource:
        assert self.said[-1].source is not None
        return self.said[-1].source


@asynccontextmanager
async def engines(count: int, announce_s: float = 0.5, *, slow: bool = False) -> AsyncIterator[list[Engine]]:
    """`slow`: behind a link over which deltas are what comes first."""
    made = [Engine(announce_s) for _ in range(count)]
    for engine in made if slow else []:
        engine.store.rates = link_of(1e6)
    try:
        yield made
    finally:
        for engine in made:
            engine.store.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_an_engine_serves_on_what_it_verified_when_the_publisher_is_gone(encrypt: bool) -> None:
    async def main() -> None:
        manifest, blob = version(1)
        async with engines(2) as (first, second):
            with WeightServer(encrypt=encrypt, local=False) as trainer:
                published = trainer.publish(manifest, blob)
                assert await first.get(manifest, published) == blob
            assert bool(first.address().server_key) == encrypt
            assert (
                await second.get(manifest, published, first.address()) == blob
            )  # a joiner while the publisher is dead

    asyncio.run(main())


def test_what_comes_from_a_disk_alone_is_served_on_encrypted_where_the_run_is(tmp_path: Path) -> None:
    async def main() -> None:
        manifest, blob = version(1)
        disk = Spool(tmp_path).write(manifest, blob)
        async with engines(2) as (first, second):
            await first.get(manifest, disk)
            assert not first.address().server_key
            await first.get(
                manifest, disk, encrypt=True
            )  # published again by a trainer that encrypts from now on
            assert [said.source is None for said in first.said] == [False, True, False, False]
            assert first.address().server_key
            await second.get(manifest, disk, encrypt=True)
            assert second.address().server_key

    asyncio.run(main())


def test_an_encrypted_run_s_weights_are_not_asked_for_in_the_clear() -> None:
    async def main() -> None:
        manifest, blob = version(1)
        async with engines(1) as (engine,):
            with WeightServer(local=False) as clear, WeightServer(encrypt=True, local=False) as trainer:
                wrong = clear.publish(manifest, blob)
                with pytest.raises(WeightsError, match="no source"):
                    await engine.get(manifest, wrong, encrypt=True)
                assert (
                    await engine.get(manifest, wrong, trainer.publish(manifest, blob), encrypt=True) == blob
                )
                assert clear.stats.parts == 0

    asyncio.run(main())


def test_a_publisher_that_dies_within_a_pull_is_replaced_by_a_joiner_s_neighbours() -> None:
    async def main() -> None:
        manifest, blob = version(1)
        async with engines(2) as (first, second):
            with WeightServer(local=False) as fast:
                await first.get(manifest, fast.publish(manifest, blob))
            slow = WeightServer(local=False, nbytes_per_s=1 << 18)
            waiting = asyncio.create_task(second.get(manifest, slow.publish(manifest, blob)))
            while slow.stats.parts < 3:
                await asyncio.sleep(0.01)
            slow.close()
            second.store.offer(messages.UseWeights(1, b"", (first.address(),)))
            assert await waiting == blob

    asyncio.run(main())


def test_a_base_that_is_pulled_comes_from_those_too_that_hold_it_under_the_number_of_a_restarted_trainer() -> (
    None
):
    async def main() -> None:
        first, blob = manifests.build(1, {"w": ("int8", (8 << 20,), memoryview(bytes(8 << 20)))})
        again = msgspec.structs.replace(first, version=3)  # a number is no part of the root
        adapters, _ = manifests.build(
            2, {"w": ("int8", (1,), memoryview(b"a"))}, adapter=manifests.Adapter(first.root, 1.0, "float32")
        )
        async with engines(1) as (engine,):
            slow = WeightServer(local=False, nbytes_per_s=1 << 21)
            under = messages.BaseWeights(1, manifests.encode(first), (slow.publish(first, blob),), first.root)
            asked = messages.UseWeights(2, manifests.encode(adapters), (), base=under)
            waiting = asyncio.create_task(engine.store.get_base(adapters, asked, 20.0))
            while not slow.stats.parts:
                await asyncio.sleep(0.01)
            with WeightServer(local=False) as trainer:
                source = trainer.publish(again, blob)
                engine.store.offer(
                    messages.UseWeights(
                        2, b"", (), more=True, base=messages.BaseWeights(3, b"", (source,), again.root)
                    )
                )
                slow.close()
                pulled, buffer = await waiting
                assert trainer.stats.parts
            assert (pulled.version, buffer.view) == (1, blob)
            assert engine.said[-1].version == 1

    asyncio.run(main())


def test_a_long_pull_serves_others_before_it_is_complete() -> None:
    async def main() -> None:
        manifest, blob = version(1)
        async with engines(2, announce_s=0.05) as (first, second):
            with WeightServer(local=False, nbytes_per_s=1 << 20) as trainer:
                published = trainer.publish(manifest, blob)
                one = asyncio.create_task(first.get(manifest, published))
                while not first.said:
                    await asyncio.sleep(0.01)
                assert not first.address().complete
                assert await second.get(manifest, published, first.address()) == blob
                assert await one == blob
                assert first.address().complete
                assert trainer.stats.parts < 1.8 * len(manifest.chunk_hashes)

    asyncio.run(main())


def test_no_holder_left_is_said_and_the_next_try_begins_where_this_one_ended() -> None:
    async def main() -> None:
        manifest, blob = version(1)
        async with engines(1) as (engine,):
            slow = WeightServer(local=False, nbytes_per_s=1 << 18)
            waiting = asyncio.create_task(engine.get(manifest, slow.publish(manifest, blob), deadline_s=1.0))
            while slow.stats.parts < 3:
                await asyncio.sleep(0.01)
            slow.close()
            with pytest.raises(WeightsError, match=r"not complete after 1\.\d+ s: \d+ of 32 chunks"):
                await waiting
            again, same = manifests.build(5, {"w": ("bfloat16", (1 << 18,), blob)}, chunk_nbytes=1 << 14)
            with WeightServer(local=False) as trainer:  # the trainer republishes, under a new number
                assert await engine.get(again, trainer.publish(again, same)) == blob
                assert 0 < trainer.stats.parts <= 29

    asyncio.run(main())


def test_two_versions_in_quick_succession_and_a_joiner_three_behind_end_with_the_newest() -> None:
    async def main() -> None:
        published = {number: version(number) for number in (1, 2, 3, 4)}
        async with engines(1) as (engine,):
            with WeightServer(local=False, keep=4, nbytes_per_s=1 << 20) as trainer:
                addresses = {number: trainer.publish(*made) for number, made in published.items()}
                assert await engine.get(published[1][0], addresses[1]) == published[1][1]
                tasks = []
                for number in (2, 3):
                    if tasks:
                        tasks[-1].cancel()
                    tasks.append(asyncio.create_task(engine.get(published[number][0], addresses[number])))
                    await asyncio.sleep(0.05)
                assert await tasks[-1] == published[3][1]
                assert tasks[0].cancelled()
                assert await engine.get(published[4][0], addresses[4], keep=(3,)) == published[4][1]
                source = engine.store._source
                assert source is not None
                assert source.versions() == [3, 4]  # it was told to keep 3, and let go of 1

    asyncio.run(main())


def test_an_engine_is_sent_what_changed_since_its_version() -> None:
    async def main() -> None:
        first, blob = version(1)
        later = bytearray(blob)
        later[::999] = bytes(len(later[::999]))
        second, new = manifests.build(
            2, {"w": ("bfloat16", (1 << 18,), memoryview(later))}, chunk_nbytes=1 << 14
        )
        async with engines(1, slow=True) as (engine,):
            with WeightServer(local=False, deltas=1) as trainer:
                await engine.get(first, trainer.publish(first, blob))
                sent = trainer.stats.nbytes
                address = trainer.publish(second, new)
                trainer.wait_deltas()
                assert await engine.get(second, address) == new
                assert trainer.chains.used == len(second.chunk_hashes)
                assert trainer.stats.nbytes - sent < sent / 20

    asyncio.run(main())


def steps(count: int) -> list[tuple[Manifest, memoryview]]:
    """Versions of which each differs little from the one before."""
    made = [version(1)]
    for number in range(2, count + 1):
        data = bytearray(made[-1][1])
        for at in range(number, len(data), 999):
            data[at] ^= 1
        made.append(
            manifests.build(
                number, {"w": ("bfloat16", (len(data) // 2,), memoryview(data))}, chunk_nbytes=1 << 14
            )
        )
    return made


def network(source: messages.WeightSource) -> messages.WeightSource:
    """As a receiver on another machine sees it."""
    return msgspec.structs.replace(source, local="")


@pytest.mark.parametrize("encrypt", [False, True])
def test_an_engine_gives_on_the_deltas_that_it_was_sent_also_to_one_two_versions_behind(
    encrypt: bool,
) -> None:
    async def main() -> None:
        published = steps(3)
        chunks = len(published[0][0].chunk_hashes)
        async with engines(3, slow=True) as (first, second, behind):
            with WeightServer(local=False, deltas=2, encrypt=encrypt) as trainer:
                for manifest, blob in published:
                    address = trainer.publish(manifest, blob)
                    trainer.wait_deltas()
                    assert await first.get(manifest, address) == blob
                    if manifest.version <= 2:
                        assert await second.get(manifest, address) == blob
                    if manifest.version == 1:
                        assert await behind.get(manifest, address) == blob
                assert trainer.chains.used == 3 * chunks
            holder = first.store._source
            assert holder is not None
            for engine, used in ((second, chunks), (behind, 2 * chunks)):
                assert await engine.get(published[2][0], network(first.address())) == published[2][1]
                assert holder.chains.used == used
            assert parts_sent(holder, 2 * chunks) == 2 * chunks
            assert holder.stats.nbytes < published[2][0].total_nbytes / 5

    asyncio.run(main())


def test_an_engine_without_the_receiver_s_version_gives_on_whole_chunks() -> None:
    async def main() -> None:
        published = steps(2)
        async with engines(2, slow=True) as (holder, receiver):
            with WeightServer(local=False) as trainer:
                addresses = [trainer.publish(*made) for made in published]
                await holder.get(published[1][0], addresses[1])
                await receiver.get(published[0][0], addresses[0])
            assert await receiver.get(published[1][0], network(holder.address())) == published[1][1]
            assert holder.store._source is not None
            assert holder.store._source.chains.used == 0

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(8))
def test_a_holder_that_dies_while_it_gives_on_deltas_is_replaced_by_another(seed: int) -> None:
    async def main() -> None:
        published = steps(2)
        async with engines(3, slow=True) as (dying, other, receiver):
            with WeightServer(local=False, deltas=1) as trainer:
                for manifest, blob in published:
                    address = trainer.publish(manifest, blob)
                    trainer.wait_deltas()
                    for engine in (dying, other) if manifest.version == 2 else (dying, other, receiver):
                        await engine.get(manifest, address)
            newest, blob = published[1]
            lost_source, kept_source = dying.store._source, other.store._source
            assert lost_source is not None
            assert kept_source is not None
            sent = sum(map(len, dying.store._relay._steps[newest.root].chunks.values()))
            with Cut(network(dying.address()), random.Random(seed).randrange(sent)) as lost:
                waiting = asyncio.create_task(receiver.get(newest, lost.address))
                async with asyncio.timeout(20.0):
                    while not lost.gone:
                        await asyncio.sleep(0.005)  # polls a condition
                assert not waiting.done(), "nothing is used before all of it is here"
                receiver.store.offer(messages.UseWeights(2, b"", (network(other.address()),)))
                assert await waiting == blob
            assert kept_source.chains.used == kept_source.stats.parts > 0, "and it, too, sends what changed"
            assert lost_source.stats.nbytes + kept_source.stats.nbytes < newest.total_nbytes / 5

    asyncio.run(main())


def test_the_same_weights_under_another_number_are_not_pulled_again() -> None:
    async def main() -> None:
        first, blob = version(1, seed=7)
        again, _ = version(9, seed=7)
        async with engines(1) as (engine,):
            with WeightServer(local=False) as trainer:
                await engine.get(first, trainer.publish(first, blob))
            assert await engine.get(again) == blob
            assert [said.version for said in engine.said] == [1, 9]

    asyncio.run(main())


def test_a_base_that_is_held_takes_no_hashing() -> None:
    """The figure is of this pull, not of the one before it."""

    async def main() -> None:
        base, base_blob = manifests.build(1, {"w": ("bfloat16", (1 << 21,), memoryview(os.urandom(1 << 22)))})
        adapter = manifests.Adapter(base.root, 1.0, "bfloat16")
        adapters = [
            manifests.build(
                number,
                {"l.lora_A.weight": ("bfloat16", (1 << 18,), memoryview(os.urandom(1 << 19)))},
                adapter=adapter,
            )
            for number in (2, 3)
        ]
        async with engines(1) as (engine,):
            with WeightServer(local=False, keep=4) as trainer:
                await engine.get(base, trainer.publish(base, base_blob))
                assert engine.store.verify_s > 0
                named = messages.BaseWeights(
                    base.version, manifests.encode(base), (trainer.publish(base, base_blob),)
                )
                for manifest, blob in adapters:
                    for said in (None, named):  # here already, whether or not it is named
                        order = messages.UseWeights(
                            manifest.version,
                            b"m",
                            (trainer.publish(manifest, blob),),
                            (base.version,),
                            base=said,
                        )
                        assert (await engine.store.get_base(manifest, order, 10.0))[0].root == base.root
                        assert engine.store.verify_s == 0.0
                    await engine.store.get(manifest, order, 10.0)
                    assert engine.store.verify_s > 0

    asyncio.run(main())


def test_another_history_s_weights_under_the_same_number_replace_those_served() -> None:
    async def main() -> None:
        old, old_blob = version(1, seed=1)
        new, new_blob = version(1, seed=2)
        async with engines(2) as (engine, other):
            with WeightServer(local=False) as one, WeightServer(local=False) as two:
                await engine.get(old, one.publish(old, old_blob))
                stale = engine.address()
                assert await engine.get(new, two.publish(new, new_blob)) == new_blob
            assert await other.get(new, engine.address()) == new_blob
            with pytest.raises(WeightsError, match="under this token"):
                await other.get(old, stale)

    asyncio.run(main())


def test_a_process_that_cannot_serve_still_receives() -> None:
    async def main() -> None:
        manifest, blob = version(1)

        def nowhere() -> str:
            raise OSError("no address")

        store = Store(keys.generate(), lambda _s: pytest.fail("it serves nothing"), nowhere, limits=LIMITS)
        with WeightServer() as trainer:
            address = trainer.publish(manifest, blob)
            assert (await store.get(manifest, messages.UseWeights(1, b"m", (address,)), 5.0)).view == blob
        store.close()

    asyncio.run(main())


async def quiet(buffer: Buffer) -> None:
    """Until the threads that filled it have let go of it."""
    until = time.monotonic() + 90.0
    while not buffer.idle():
        assert time.monotonic() < until, "somebody still looks at it"
        await asyncio.sleep(0.01)  # polls a condition


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is let go of is gone at once, without a garbage collector, which an idle process may not see for minutes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_third_version_is_written_where_the_first_was_once_nobody_reads_that() -> None:
    async def main() -> None:
        published = [version(number) for number in (1, 2, 3, 4)]
        store = Store(keys.generate(), lambda _s: None, lambda: "127.0.0.1", limits=LIMITS)
        with WeightServer(local=False, keep=4) as trainer:
            buffers = []
            for manifest, blob in published:
                address = trainer.publish(manifest, blob)
                if manifest.version == 3:
                    await quiet(buffers[0])
                buffers.append(
                    await store.get(manifest, messages.UseWeights(manifest.version, b"m", (address,)), 10.0)
                )
                assert buffers[-1].view == blob
                if manifest.version == 2:
                    reading = buffers[1].view[:10]  # the engine has not let go of version 2 yet
        store.close()
        assert buffers[2] is buffers[0]
        assert buffers[3] is not buffers[1]
        assert reading == published[1][1][:10]

    asyncio.run(main())


def test_a_source_that_stopped_keeps_nothing_from_use_and_a_new_one_serves_the_next_version() -> None:
    async def main() -> None:
        published = [version(number) for number in (1, 2, 3)]
        async with engines(2) as (engine, other):
            with WeightServer(local=False, keep=4) as trainer:
                addresses = [trainer.publish(*made) for made in published]
                await engine.get(published[0][0], addresses[0])
                assert engine.store._source is not None
                engine.store._source.close()
                assert await engine.get(published[1][0], addresses[1]) == published[1][1]
                assert engine.said[-1].source is None, "nobody is sent to what serves no more"
                assert await engine.get(published[2][0], addresses[2]) == published[2][1]
            assert await other.get(published[2][0], engine.address()) == published[2][1]

    asyncio.run(main())


def test_what_is_held_and_no_more_as_published_is_let_go_when_it_is_hashed_again_and_pulled_to_other_memory() -> (
    None
):
    async def main() -> None:
        (first, one), (second, two) = version(1), version(2)
        async with engines(1) as (engine,):
            with WeightServer() as trainer:
                sources = trainer.publish(first, one), trainer.publish(second, two)
                bad = await engine.get(first, sources[0])
                good = await engine.get(second, sources[1], keep=(1,))
                assert await engine.store.recheck({first.root, second.root}) == []
                bad[-1] ^= 1
                assert await engine.store.recheck({second.root}) == [], "it was not asked for the other"
                assert await engine.store.recheck({first.root, second.root}) == [1]
                assert engine.said[-1] == messages.Serving(1, first.root, None)
                anew = await engine.get(first, sources[0], keep=(2,))
                assert anew == one
                assert bad != one, "other memory"
                assert good == two

    asyncio.run(main())
