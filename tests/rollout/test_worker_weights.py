"""How the worker, against a real socket and with a scripted engine, pulls, merges, checks and serves weights."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable

import msgspec
import pytest

from rollout.engines.base import Weight
from scavenger.protocol import keys, messages
from scavenger.protocol.worker.events import EXIT_ENGINE_FAILED
from scavenger.weights import manifest as manifests
from scavenger.weights.pull import pull
from scavenger.weights.source import WeightServer
from tests.rollout.stage import Play, Stage, kind_of


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not holds():
            await asyncio.sleep(0.01)  # polls a condition


def test_a_worker_serves_on_what_it_loaded_and_says_so_again_to_a_restarted_daemon(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        told = await stage.daemon.expect(messages.Serving)
        assert told.source is not None
        assert told.source.complete
        manifest, blob = manifests.build(1, {"w": ("float32", (256,), memoryview(bytes([1]) * 1024))})
        assert told.root == manifest.root
        assert (await pull(manifest, [told.source], keys.generate(), 5.0)).view == blob
        stage.restart_daemon()
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        assert await stage.daemon.expect(messages.Serving) == told

    play(scene)


def test_what_was_pulled_beside_generation_is_here_when_the_order_to_load_it_comes(play: Play) -> None:
    """Its holder may be gone by then. Before, no byte of a version came while the engine had work."""

    async def scene(stage: Stage) -> None:
        await stage.ready()
        manifest, blob = manifests.build(2, {"w": ("float32", (256,), memoryview(bytes([2]) * 1024))})
        with WeightServer() as source:
            order = messages.UseWeights(2, manifests.encode(manifest), (source.publish(manifest, blob),))
            stage.assign(1, most=10_000)
            await stage.daemon.expect(messages.Chunks)
            stage.daemon.send(messages.PullAhead(order))
            while (await stage.daemon.expect(messages.Serving)).version != 2:
                pass
        assert stage.engine.calls == ["load 1 1024"]
        assert stage.engine.requests, "it generates with its own version"
        stage.daemon.send(order)
        loaded = await stage.daemon.expect(messages.WeightsLoaded)
        assert (loaded.version, loaded.root) == (2, manifest.root)
        assert stage.engine.calls == ["load 1 1024", "load 2 1024"]

    play(scene)


def test_an_order_to_load_what_is_on_its_way_waits_for_that_pull(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        data = memoryview(bytes(4 << 20))
        manifest, blob = manifests.build(2, {"w": ("float32", (len(data) // 4,), data)})
        with WeightServer(local=False, nbytes_per_s=2 * len(data)) as source:
            order = messages.UseWeights(2, manifests.encode(manifest), (source.publish(manifest, blob),))
            stage.daemon.send(messages.PullAhead(order))
            while not source.stats.parts:
                await asyncio.sleep(0.005)  # polls a condition
            stage.daemon.send(order)
            assert (await stage.daemon.expect(messages.WeightsLoaded)).version == 2
            chunks = len(manifest.chunk_hashes)
            await until(lambda: source.stats.parts >= chunks)  # the last is counted after it was sent
            assert source.stats.parts == chunks, "no chunk came twice"

    play(scene)


def test_a_newer_version_to_pull_ahead_is_pulled_behind_the_one_that_is_on_its_way(play: Play) -> None:
    """Before, an order that came during a pull was dropped."""

    async def scene(stage: Stage) -> None:
        await stage.ready()
        data = memoryview(bytes(4 << 20))
        slow, blob = manifests.build(2, {"w": ("float32", (len(data) // 4,), data)})
        with WeightServer(local=False, nbytes_per_s=4 * len(data)) as source:
            order = messages.UseWeights(2, manifests.encode(slow), (source.publish(slow, blob),), keep=(1,))
            stage.assign(1, most=10_000)
            stage.daemon.send(messages.PullAhead(order))
            while not source.stats.parts:
                await asyncio.sleep(0.005)  # polls a condition
            for number in (3, 4):
                manifest, blob = manifests.build(
                    number, {"w": ("float32", (256,), memoryview(bytes([number]) * 1024))}
                )
                newer = messages.UseWeights(
                    number, manifests.encode(manifest), (stage.source.publish(manifest, blob),), keep=(1,)
                )
                stage.daemon.send(messages.PullAhead(newer))
            served = {1}
            while 4 not in served:
                served.add((await stage.daemon.expect(messages.Serving)).version)
        assert served == {1, 2, 4}, "of those that wait the newest order counts"
        await until(lambda: [beat.ahead for beat in stage.daemon.beats[-1:]] == [4])
        assert stage.engine.calls == ["load 1 1024"]

    play(scene)


def test_a_pull_ahead_that_fails_is_told_by_the_next_heartbeat(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        data = memoryview(bytes(4 << 20))
        manifest, blob = manifests.build(2, {"w": ("float32", (len(data) // 4,), data)})
        with WeightServer(local=False, nbytes_per_s=len(data) // 4) as source:
            order = messages.UseWeights(2, manifests.encode(manifest), (source.publish(manifest, blob),))
            stage.daemon.send(messages.PullAhead(order))
            await until(lambda: [beat.ahead for beat in stage.daemon.beats[-1:]] == [2])
        await until(lambda: [beat.ahead for beat in stage.daemon.beats[-1:]] == [-1])

    play(scene)


def test_adapters_are_merged_with_their_base_which_is_pulled_first_and_once(play: Play) -> None:
    base, blob = manifests.build(1, {"a.weight": ("float32", (16, 8), memoryview(bytes(512)))})

    def adapters(number: int) -> tuple[manifests.Manifest, memoryview]:
        data = memoryview(bytearray(array("f", [float(number)] * 32).tobytes()))
        tensors = {
            "a.lora_A.weight": ("float32", (2, 8), data[:64]),
            "a.lora_B.weight": ("float32", (16, 2), data),
        }
        return manifests.build(number, tensors, adapter=manifests.Adapter(base.root, 0.5, "bfloat16"))

    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        under = messages.BaseWeights(1, manifests.encode(base), (stage.source.publish(base, blob),))
        for number in (2, 3):
            manifest, own = adapters(number)
            order = messages.UseWeights(
                number, manifests.encode(manifest), (stage.source.publish(manifest, own),), base=under
            )
            wrong = messages.BaseWeights(9, order.manifest, order.sources)
            stage.daemon.send(msgspec.structs.replace(order, base=wrong))
            assert (
                f"is of the base {base.root.hex()}, and"
                in (await stage.daemon.expect(messages.WeightsFailed)).reason
            )
            stage.daemon.send(order)
            loaded = await stage.daemon.expect(messages.WeightsLoaded)
            assert (loaded.version, loaded.root) == (number, manifest.root)
        assert stage.engine.calls == ["load 2 256", "load 3 256"], "16 x 8 numbers in bfloat16"
        assert stage.source.stats.nbytes + 512 * stage.source.stats.mapped <= 2 * (512 + 192)
        said = {said.version for said in stage.daemon.inbox if isinstance(said, messages.Serving)}
        assert said >= {1, 2, 3}
        loading = stage.rollout._store.rates.loading
        assert loading.count == 2
        assert loading.nbytes == pytest.approx(1.95 * (512 + 192)), "each load reads its base too"

    play(scene)


def stated() -> tuple[manifests.Manifest, Callable[[Stage], messages.UseWeights]]:
    """Adapters whose trainer says what they make of their base, and the order to load them."""
    torch = pytest.importorskip("torch", reason="merging needs torch")
    from rollout.engines import checksum

    base, blob = manifests.build(1, {"a.weight": ("float32", (16, 8), memoryview(bytes(512)))})
    data = memoryview(bytearray(array("f", [3.0] * 32).tobytes()))
    tensors = {
        "a.lora_A.weight": ("float32", (2, 8), data[:64]),
        "a.lora_B.weight": ("float32", (16, 2), data),
    }
    plain, own = manifests.build(2, tensors, adapter=manifests.Adapter(base.root, 0.5, "bfloat16"))
    right = checksum.digest({"a.weight": checksum.checksum(torch.full((16, 8), 9.0, dtype=torch.bfloat16))})
    manifest = msgspec.structs.replace(plain, merged=right)

    def order(stage: Stage) -> messages.UseWeights:
        under = messages.BaseWeights(1, manifests.encode(base), (stage.source.publish(base, blob),))
        return messages.UseWeights(
            2, manifests.encode(manifest), (stage.source.publish(manifest, own),), base=under
        )

    return manifest, order


def test_an_engine_that_merges_otherwise_than_its_trainer_says_so_and_loads_again(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, order_of = stated()
    right = manifest.merged
    from rollout.engines import lora

    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        order = order_of(stage)
        with monkeypatch.context() as wrong:
            merged = lora.merged
            wrong.setattr(lora, "merged", lambda weight, down, up, scale: merged(weight, down, up, 2 * scale))
            stage.daemon.send(order)
            failed = await stage.daemon.expect(messages.WeightsFailed)
            assert "merged here to other weights" in failed.reason
            assert failed.refused, "all of it came: the daemon counts who will not serve it"
            assert f"than by its trainer ({right.hex()[:16]})" in failed.reason
            assert "remedy: run engines and trainer of one release" in failed.reason
        stage.daemon.send(order)
        loaded = await stage.daemon.expect(messages.WeightsLoaded)
        assert (loaded.version, loaded.root, loaded.merged) == (2, manifest.root, right)
        stage.restart_daemon()
        hello = await stage.daemon.expect(messages.WorkerHello)
        assert (hello.loaded_version, hello.loaded_merged) == (2, right)

    play(scene)


def test_after_a_mismatch_what_is_held_is_hashed_and_what_flipped_is_pulled_anew(play: Play) -> None:
    manifest, order_of = stated()

    async def scene(stage: Stage) -> None:
        load = stage.engine.load

        async def flips(version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
            (weight,) = given = list(tensors)
            assert isinstance(weight, merging.Merged)
            weight.base.data[3] ^= 0x40  # of what the store holds: 0.0 is 2.0 now
            stage.engine.load = load  # type: ignore[method-assign]
            return await load(version, given, summed=summed)

        stage.engine.load = flips  # type: ignore[method-assign]
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        order = order_of(stage)
        stage.daemon.send(order)
        gone = await stage.daemon.expect(messages.Serving)
        while gone.source is not None:
            gone = await stage.daemon.expect(messages.Serving)
        assert gone.version == 1, "the base is not served on; the adapters are as published"
        assert "merged here to other weights" in (await stage.daemon.expect(messages.WeightsFailed)).reason
        stage.daemon.send(order)
        assert (await stage.daemon.expect(messages.WeightsLoaded)).merged == manifest.merged

    from rollout.engines import merging

    play(scene)


def test_an_engine_that_merges_otherwise_a_second_time_ends_with_70(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, order_of = stated()
    from rollout.engines import lora

    merged = lora.merged
    monkeypatch.setattr(lora, "merged", lambda weight, down, up, scale: merged(weight, down, up, 2 * scale))

    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        order = order_of(stage)
        for _ in range(2):
            stage.daemon.send(order)
            failed = await stage.daemon.expect(messages.WeightsFailed)
        goodbye = await stage.daemon.expect(messages.Goodbye)
        assert (goodbye.reason, goodbye.failed, goodbye.notice) == (failed.reason, True, False)
        stage.daemon.send(messages.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)
        assert stage.source.stats.nbytes + 512 * stage.source.stats.mapped <= 512 + 512 + 192, (
            "what was held was as published, and stayed"
        )

    play(scene)


def test_a_pull_whose_only_holder_is_silent_goes_on_with_those_that_the_daemon_names(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        manifest, blob = manifests.build(1, {"w": ("float32", (256,), memoryview(bytes([1]) * 1024))})
        nobody = messages.WeightSource("tcp://127.0.0.1:1", "", bytes(32))
        stage.daemon.send(messages.UseWeights(1, manifests.encode(manifest), (nobody,)))
        stage.daemon.send(
            messages.UseWeights(1, b"", (nobody, stage.source.publish(manifest, blob)), more=True)
        )
        assert (await stage.daemon.expect(messages.WeightsLoaded)).root == manifest.root

    play(scene)


def test_a_base_whose_only_holder_is_silent_comes_from_those_that_the_daemon_names_later(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        base, blob = manifests.build(1, {"a.weight": ("float32", (2, 2), memoryview(bytes(16)))})
        nothing = memoryview(bytes(8))
        tensors = {
            "a.lora_A.weight": ("float32", (1, 2), nothing),
            "a.lora_B.weight": ("float32", (2, 1), nothing),
        }
        manifest, own = manifests.build(2, tensors, adapter=manifests.Adapter(base.root, 1.0, "float32"))
        sources = (stage.source.publish(manifest, own),)
        nobody = messages.WeightSource("tcp://127.0.0.1:1", "", bytes(32))
        first = messages.BaseWeights(1, manifests.encode(base), (nobody,))
        stage.daemon.send(messages.UseWeights(2, manifests.encode(manifest), sources, base=first))
        later = messages.BaseWeights(1, b"", (nobody, stage.source.publish(base, blob)))
        stage.daemon.send(messages.UseWeights(2, b"", sources, more=True, base=later))
        assert (await stage.daemon.expect(messages.WeightsLoaded)).root == manifest.root

    play(scene)


def test_corrupt_weights_are_reported_and_the_next_version_is_loaded(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.use(2, corrupt=True)
        failed = await stage.daemon.expect(messages.WeightsFailed)
        assert (failed.version, "hash" in failed.reason, failed.refused) == (2, True, False)
        stage.use(3)
        assert (await stage.daemon.expect(messages.WeightsLoaded)).version == 3
        assert stage.engine.calls == ["load 1 1024", "load 3 1024"]

    play(scene)


def test_a_pull_that_fails_in_an_unforeseen_way_is_reported_and_tried_again_when_asked(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_args: object, **_keywords: object) -> bytearray:
        raise ValueError("not a port")

    async def scene(stage: Stage) -> None:
        await stage.ready()
        with monkeypatch.context() as patch:
            patch.setattr("scavenger.weights.engine_store.Pull.finish", fails)
            stage.use(2)
            failed = await stage.daemon.expect(messages.WeightsFailed)
            assert (failed.version, kind_of(failed.reason)) == (2, "ValueError at test_worker_weights.py")
        stage.use(2)
        assert (await stage.daemon.expect(messages.WeightsLoaded)).version == 2

    play(scene)
