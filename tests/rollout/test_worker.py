"""The worker against a real socket, in this process, with a scripted engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec
import pytest
import zmq

from rollout.engines.base import Host, Weight
from rollout.events import EXIT_DRAINED, EXIT_ENGINE_FAILED, EXIT_REFUSED, Limits
from rollout.worker import Options, Worker
from scavenger import keys, wire
from scavenger.errors import EngineError, WeightsError
from scavenger.weights import manifest as manifests
from scavenger.weights import source_zmq
from scavenger.weights.pull import pull
from scavenger.weights.source import WeightSource
from scavenger.wire import EngineSpec, Held
from tests.rollout.daemon import FakeDaemon
from tests.rollout.stage import BEAT_S, ME, QUICK, SERVER, WHO, Scripted, Stage

Run = Callable[[Callable[[Stage], Awaitable[None]]], None]


@pytest.fixture
def play(tmp_path: Path) -> Run:
    """Run a test's coroutine on a stage, and clear the stage."""

    def run(scene: Callable[[Stage], Awaitable[None]], limits: Limits = QUICK) -> None:
        async def main() -> None:
            stage = Stage(tmp_path, limits)
            try:
                await asyncio.wait_for(scene(stage), 90.0)
            finally:
                stage.worker.cancel()
                await asyncio.gather(stage.worker, return_exceptions=True)
                stage.daemon.close()
                stage.source.close()

        asyncio.run(main())

    return run


def test_a_sample_is_streamed_acked_and_let_go(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 30)
        assert await stage.daemon.tokens(1, 30) == list(range(1000, 1030))
        stage.daemon.beats.clear()
        await _beat(stage)
        assert stage.daemon.beats[-1].held == (Held(1, 1, 30),)
        stage.daemon.send(wire.Ack((Held(1, 1, 30),)))
        await _beat(stage, lambda beat: beat.held == ())
        assert stage.engine.calls == ["load 1 1024"]

    play(scene)


def test_a_restarted_daemon_gets_everything_above_the_durable_length(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        seen = await stage.daemon.tokens(1, 20)
        stage.daemon.send(wire.Ack((Held(1, 1, 10),)))
        await _beat(stage)
        stage.restart_daemon()
        hello = await stage.daemon.expect(wire.WorkerHello)
        assert (hello.session, hello.loaded_version) == ("5e55", 1)
        assert hello.held[0].length >= 20
        stage.welcome()
        chunk = (await stage.daemon.expect(wire.Chunks)).chunks[0]
        assert (chunk.epoch, chunk.offset) == (1, 10)
        assert list(wire.unpack_tokens(chunk.tokens))[: len(seen) - 10] == seen[10:]
        assert len(chunk.tokens) // 4 + 10 >= hello.held[0].length

    play(scene)


def test_a_worker_serves_on_what_it_loaded_and_says_so_again_to_a_restarted_daemon(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        told = await stage.daemon.expect(wire.Serving)
        assert told.source is not None
        assert told.source.complete
        manifest, blob = manifests.build(1, {"w": ("float32", (256,), memoryview(bytes([1]) * 1024))})
        assert told.root == manifest.root
        assert (await pull(manifest, [told.source], keys.generate(), 5.0)).view == blob
        stage.restart_daemon()
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        assert await stage.daemon.expect(wire.Serving) == told

    play(scene)


def test_adapters_are_merged_with_their_base_which_is_pulled_first_and_once(play: Run) -> None:
    base, blob = manifests.build(1, {"a.weight": ("float32", (16, 8), memoryview(bytes(512)))})

    def adapters(number: int) -> tuple[manifests.Manifest, memoryview]:
        data = memoryview(bytearray(array("f", [float(number)] * 32).tobytes()))
        tensors = {"a.lora_A.weight": ("float32", (2, 8), data[:64]), "a.lora_B.weight": ("float32", (16, 2), data)}
        return manifests.build(number, tensors, adapter=manifests.Adapter(base.root, 0.5, "bfloat16"))

    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        under = wire.BaseWeights(1, manifests.encode(base), (stage.source.publish(base, blob),))
        for number in (2, 3):
            manifest, own = adapters(number)
            order = wire.UseWeights(number, manifests.encode(manifest), (stage.source.publish(manifest, own),), base=under)
            wrong = wire.BaseWeights(9, order.manifest, order.sources)
            stage.daemon.send(msgspec.structs.replace(order, base=wrong))
            assert f"is of the base {base.root.hex()}, and" in (await stage.daemon.expect(wire.WeightsFailed)).reason
            stage.daemon.send(order)
            loaded = await stage.daemon.expect(wire.WeightsLoaded)
            assert (loaded.version, loaded.root) == (number, manifest.root)
        assert stage.engine.calls == ["load 2 256", "load 3 256"], "16 x 8 numbers in bfloat16"
        assert stage.source.stats.nbytes + 512 * stage.source.stats.mapped <= 2 * (512 + 192)
        said = {said.version for said in stage.daemon.inbox if isinstance(said, wire.Serving)}
        assert said >= {1, 2, 3}

    play(scene)


def stated() -> tuple[manifests.Manifest, Callable[[Stage], wire.UseWeights]]:
    """Adapters whose trainer says what they make of their base, and the order to load them."""
    torch = pytest.importorskip("torch", reason="merging needs torch")
    from rollout.engines import checksum

    base, blob = manifests.build(1, {"a.weight": ("float32", (16, 8), memoryview(bytes(512)))})
    data = memoryview(bytearray(array("f", [3.0] * 32).tobytes()))
    tensors = {"a.lora_A.weight": ("float32", (2, 8), data[:64]), "a.lora_B.weight": ("float32", (16, 2), data)}
    plain, own = manifests.build(2, tensors, adapter=manifests.Adapter(base.root, 0.5, "bfloat16"))
    right = checksum.digest({"a.weight": checksum.checksum(torch.full((16, 8), 9.0, dtype=torch.bfloat16))})
    manifest = msgspec.structs.replace(plain, merged=right)

    def order(stage: Stage) -> wire.UseWeights:
        under = wire.BaseWeights(1, manifests.encode(base), (stage.source.publish(base, blob),))
        return wire.UseWeights(2, manifests.encode(manifest), (stage.source.publish(manifest, own),), base=under)

    return manifest, order


def test_an_engine_that_merges_otherwise_than_its_trainer_says_so_and_loads_again(play: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, order_of = stated()
    right = manifest.merged
    from rollout.engines import lora

    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        order = order_of(stage)
        with monkeypatch.context() as wrong:
            merged = lora.merged
            wrong.setattr(lora, "merged", lambda weight, down, up, scale: merged(weight, down, up, 2 * scale))
            stage.daemon.send(order)
            failed = await stage.daemon.expect(wire.WeightsFailed)
            assert "merged here to other weights" in failed.reason
            assert f"than by its trainer ({right.hex()[:16]})" in failed.reason
            assert "remedy: run engines and trainer of one release" in failed.reason
        stage.daemon.send(order)
        loaded = await stage.daemon.expect(wire.WeightsLoaded)
        assert (loaded.version, loaded.root, loaded.merged) == (2, manifest.root, right)
        stage.restart_daemon()
        hello = await stage.daemon.expect(wire.WorkerHello)
        assert (hello.loaded_version, hello.loaded_merged) == (2, right)

    play(scene)


def test_after_a_mismatch_what_is_held_is_hashed_and_what_flipped_is_pulled_anew(play: Run) -> None:
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
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        order = order_of(stage)
        stage.daemon.send(order)
        gone = await stage.daemon.expect(wire.Serving)
        while gone.source is not None:
            gone = await stage.daemon.expect(wire.Serving)
        assert gone.version == 1, "the base is not served on; the adapters are as published"
        assert "merged here to other weights" in (await stage.daemon.expect(wire.WeightsFailed)).reason
        stage.daemon.send(order)
        assert (await stage.daemon.expect(wire.WeightsLoaded)).merged == manifest.merged

    from rollout.engines import merging

    play(scene)


def test_an_engine_that_merges_otherwise_a_second_time_ends_with_70(play: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, order_of = stated()
    from rollout.engines import lora

    merged = lora.merged
    monkeypatch.setattr(lora, "merged", lambda weight, down, up, scale: merged(weight, down, up, 2 * scale))

    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        order = order_of(stage)
        for _ in range(2):
            stage.daemon.send(order)
            failed = await stage.daemon.expect(wire.WeightsFailed)
        goodbye = await stage.daemon.expect(wire.Goodbye)
        assert (goodbye.reason, goodbye.failed, goodbye.notice) == (failed.reason, True, False)
        stage.daemon.send(wire.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)
        assert stage.source.stats.nbytes + 512 * stage.source.stats.mapped <= 512 + 512 + 192, "what was held was as published, and stayed"

    play(scene)


def test_a_pull_whose_only_holder_is_silent_goes_on_with_those_that_the_daemon_names(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        manifest, blob = manifests.build(1, {"w": ("float32", (256,), memoryview(bytes([1]) * 1024))})
        nobody = wire.WeightSource("tcp://127.0.0.1:1", "", bytes(32))
        stage.daemon.send(wire.UseWeights(1, manifests.encode(manifest), (nobody,)))
        stage.daemon.send(wire.UseWeights(1, b"", (nobody, stage.source.publish(manifest, blob)), more=True))
        assert (await stage.daemon.expect(wire.WeightsLoaded)).root == manifest.root

    play(scene)


def test_a_base_whose_only_holder_is_silent_comes_from_those_that_the_daemon_names_later(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        base, blob = manifests.build(1, {"a.weight": ("float32", (2, 2), memoryview(bytes(16)))})
        nothing = memoryview(bytes(8))
        tensors = {"a.lora_A.weight": ("float32", (1, 2), nothing), "a.lora_B.weight": ("float32", (2, 1), nothing)}
        manifest, own = manifests.build(2, tensors, adapter=manifests.Adapter(base.root, 1.0, "float32"))
        sources = (stage.source.publish(manifest, own),)
        nobody = wire.WeightSource("tcp://127.0.0.1:1", "", bytes(32))
        first = wire.BaseWeights(1, manifests.encode(base), (nobody,))
        stage.daemon.send(wire.UseWeights(2, manifests.encode(manifest), sources, base=first))
        later = wire.BaseWeights(1, b"", (nobody, stage.source.publish(base, blob)))
        stage.daemon.send(wire.UseWeights(2, b"", sources, more=True, base=later))
        assert (await stage.daemon.expect(wire.WeightsLoaded)).root == manifest.root

    play(scene)


def test_a_daemon_that_forgot_the_connection_is_greeted_again(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        await stage.daemon.tokens(1, 5)
        stage.daemon.send(wire.HelloAgain("declared dead"))
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        stage.daemon.send(wire.Revoke(((1, 1),), "moved on"))
        await _beat(stage, lambda beat: beat.held == ())
        assert stage.engine.requests == {}

    play(scene)


def test_a_silent_daemon_is_looked_for_again(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.daemon.answers = False
        hello = await stage.daemon.expect(wire.WorkerHello)
        assert hello.session == "5e55"
        assert len(stage.daemon.beats) >= 3

    play(scene)


def test_a_failed_sample_and_a_refused_one_are_reported(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(5, 10, prompt=(666,))
        failed = await stage.daemon.expect(wire.SampleFailed)
        assert (failed.sample_id, failed.epoch) == (5, 1)
        assert "too long" in failed.reason

    play(scene)


def test_corrupt_weights_are_reported_and_the_next_version_is_loaded(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.use(2, corrupt=True)
        failed = await stage.daemon.expect(wire.WeightsFailed)
        assert (failed.version, "hash" in failed.reason) == (2, True)
        stage.use(3)
        assert (await stage.daemon.expect(wire.WeightsLoaded)).version == 3
        assert stage.engine.calls == ["load 1 1024", "load 3 1024"]

    play(scene)


def test_sleep_and_wake_reach_the_engine_in_order(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        await stage.daemon.tokens(1, 5)
        stage.daemon.send(wire.Sleep())
        await stage.daemon.expect(wire.Asleep)
        assert stage.engine.requests == {}
        stage.daemon.send(wire.Wake())
        stage.assign(1, 40, epoch=2, accepted=(1000,))
        chunk = (await stage.daemon.expect(wire.Chunks)).chunks[0]
        while chunk.epoch != 2:
            chunk = (await stage.daemon.expect(wire.Chunks)).chunks[0]
        assert (chunk.offset, wire.unpack_tokens(chunk.tokens)[0]) == (1, 1001)
        assert stage.engine.calls[1:] == ["sleep", "wake"]

    play(scene)


def test_a_drained_worker_says_goodbye_and_ends_with_0(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        await stage.daemon.tokens(1, 5)
        stage.daemon.send(wire.Drain("surplus"))
        assert await stage.daemon.expect(wire.Goodbye) == wire.Goodbye("surplus", notice=False)
        stage.daemon.send(wire.GoodbyeAck())
        await stage.ends(EXIT_DRAINED)

    play(scene)


def test_a_dead_engine_ends_the_worker_with_70(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.engine.kill(EngineError("the engine's core is gone"))
        goodbye = await stage.daemon.expect(wire.Goodbye)
        assert "core is gone" in goodbye.reason
        assert (goodbye.failed, goodbye.notice) == (True, False)
        stage.daemon.send(wire.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def test_an_engine_whose_serving_fails_ends_with_70_and_not_as_preempted(play: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody took its GPU: the ledger must not say so."""

    def attempt(self: source_zmq.CurveServer, *_: object) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    async def scene(stage: Stage) -> None:
        await stage.ready()
        manifest, blob = manifests.build(2, {"w": ("float32", (256,), memoryview(bytes(1024)))})
        with WeightSource(encrypt=True, local=False) as publisher:
            order = wire.UseWeights(2, manifests.encode(manifest), (publisher.publish(manifest, blob),), encrypt=True)
            stage.daemon.send(order)
            serving = await stage.daemon.expect(wire.Serving)
            while serving.source is None or not serving.source.server_key:
                serving = await stage.daemon.expect(wire.Serving)
            await stage.daemon.expect(wire.WeightsLoaded)
            monkeypatch.setattr(source_zmq.CurveServer, "_attempt", attempt)  # stands for a `recv` or `poll` that fails
            with pytest.raises(WeightsError):
                await pull(manifest, (msgspec.structs.replace(serving.source, local=""),), keys.generate(), 0.5)
            goodbye = await stage.daemon.expect(wire.Goodbye)
            assert (goodbye.failed, goodbye.notice) == (True, False)
            assert "cannot serve any more" in goodbye.reason
            stage.daemon.send(wire.GoodbyeAck())
            await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def kind_of(reason: str) -> str:
    """An unforeseen error's type and file, which is all that the daemon is told of it: its words may quote a prompt."""
    assert reason.endswith("(its own words are in the log of the process)")
    return reason.partition(":")[0]


def test_an_engine_that_fails_in_an_unforeseen_way_is_dead_and_not_silent(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        await stage.daemon.tokens(1, 5)
        stage.engine.kill(KeyError("rope_type"))
        goodbye = await stage.daemon.expect(wire.Goodbye)
        assert (kind_of(goodbye.reason), goodbye.failed) == ("KeyError at stage.py", True)
        stage.daemon.send(wire.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def test_a_request_that_breaks_the_engine_kills_it_and_not_the_sample_alone(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 10, prompt=(667,))
        goodbye = await stage.daemon.expect(wire.Goodbye)
        assert (kind_of(goodbye.reason), goodbye.failed) == ("TypeError at stage.py", True)
        stage.daemon.send(wire.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def test_an_engine_that_cannot_be_built_for_an_unforeseen_reason_ends_the_worker(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        async def build(_spec: EngineSpec, _host: Host) -> Scripted:
            raise IndexError("no device 3")

        stage.build = build  # type: ignore[method-assign]
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        goodbye = await stage.daemon.expect(wire.Goodbye)
        assert (kind_of(goodbye.reason), goodbye.failed) == ("IndexError at test_worker.py", True)

    play(scene)


def test_a_pull_that_fails_in_an_unforeseen_way_is_reported_and_tried_again_when_asked(play: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_args: object, **_keywords: object) -> bytearray:
        raise ValueError("not a port")

    async def scene(stage: Stage) -> None:
        await stage.ready()
        with monkeypatch.context() as patch:
            patch.setattr("scavenger.weights.store.Pull.finish", fails)
            stage.use(2)
            failed = await stage.daemon.expect(wire.WeightsFailed)
            assert (failed.version, kind_of(failed.reason)) == (2, "ValueError at test_worker.py")
        stage.use(2)
        assert (await stage.daemon.expect(wire.WeightsLoaded)).version == 2

    play(scene)


@pytest.mark.parametrize("broken", ["rollout.link.read_rendezvous", "scavenger.wire.decode_to_worker"])
def test_a_link_that_breaks_in_an_unforeseen_way_is_made_anew(play: Run, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        failures = []

        def fails(*_args: object) -> None:
            failures.append(1)
            raise KeyError("unforeseen")

        with monkeypatch.context() as patch:
            patch.setattr(broken, fails)
            if broken == "rollout.link.read_rendezvous":
                stage.daemon.send(wire.Rejected("not open", "wait", retry=True))  # connect again
            while not failures:
                await asyncio.sleep(BEAT_S / 4)
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        stage.assign(1, 10)
        assert await stage.daemon.tokens(1, 10) == list(range(1000, 1010))

    play(scene)


def test_a_refused_worker_ends_with_78_and_tells_the_remedy(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(wire.WorkerHello)
        stage.daemon.send(wire.Rejected("protocol 1 is too old", "update the worker"))
        leave = await stage.ends(EXIT_REFUSED)
        assert (leave.reason, leave.remedy) == ("protocol 1 is too old", "update the worker")

    play(scene)


def test_a_daemon_that_comes_late_is_found(tmp_path: Path) -> None:
    async def main() -> None:
        options = Options(tmp_path, ME, WHO, Limits(backoff_s=0.02))
        worker = asyncio.create_task(Worker(options, builder=lambda _name: Stage.build).run())  # type: ignore[arg-type,return-value]
        await asyncio.sleep(0.1)
        with FakeDaemon(tmp_path, SERVER, {ME.public}) as daemon:
            await daemon.expect(wire.WorkerHello, 5.0)
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    asyncio.run(main())


async def _beat(stage: Stage, until: Callable[[wire.Heartbeat], bool] = lambda _beat: True) -> None:
    """Wait for a further heartbeat that says so."""
    async with asyncio.timeout(5.0):
        while True:
            count = len(stage.daemon.beats)
            while len(stage.daemon.beats) == count:
                await asyncio.sleep(BEAT_S / 4)
            if until(stage.daemon.beats[-1]):
                return
