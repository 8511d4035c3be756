"""How the worker ends, against a real socket and with a scripted engine: what it says, and its exit code."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
import zmq

from rollout.engines.base import EngineHost, Weight
from scavenger.errors import EngineError, WeightsDiffer, WeightsError
from scavenger.protocol import keys, messages
from scavenger.protocol.messages import EngineSpec
from scavenger.protocol.worker.events import EXIT_DRAINED, EXIT_ENGINE_FAILED, EXIT_REFUSED
from scavenger.weights import manifest as manifests
from scavenger.weights import source_zmq
from scavenger.weights.pull import pull
from scavenger.weights.source import WeightServer
from tests.rollout.stage import Play, Scripted, Stage, kind_of


def test_a_drained_worker_says_goodbye_and_ends_with_0(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        await stage.daemon.tokens(1, 5)
        stage.daemon.send(messages.Drain("surplus"))
        assert await stage.daemon.expect(messages.Goodbye) == messages.Goodbye("surplus", notice=False)
        stage.daemon.send(messages.GoodbyeAck())
        await stage.ends(EXIT_DRAINED)

    play(scene)


def test_a_dead_engine_ends_the_worker_with_70(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.engine.kill(EngineError("the engine's core is gone"))
        goodbye = await stage.daemon.expect(messages.Goodbye)
        assert "core is gone" in goodbye.reason
        assert (goodbye.failed, goodbye.notice) == (True, False)
        stage.daemon.send(messages.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def test_an_engine_whose_serving_fails_ends_with_70_and_not_as_preempted(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody took its GPU: the ledger must not say so."""

    def attempt(self: source_zmq.CurveServer, *_: object) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    async def scene(stage: Stage) -> None:
        await stage.ready()
        manifest, blob = manifests.build(2, {"w": ("float32", (256,), memoryview(bytes(1024)))})
        with WeightServer(encrypt=True, local=False) as publisher:
            order = messages.UseWeights(
                2, manifests.encode(manifest), (publisher.publish(manifest, blob),), encrypt=True
            )
            stage.daemon.send(order)
            serving = await stage.daemon.expect(messages.Serving)
            while serving.source is None or not serving.source.server_key:
                serving = await stage.daemon.expect(messages.Serving)
            await stage.daemon.expect(messages.WeightsLoaded)
            monkeypatch.setattr(
                source_zmq.CurveServer, "_attempt", attempt
            )  # stands for a `recv` or `poll` that fails
            with pytest.raises(WeightsError):
                await pull(
                    manifest, (msgspec.structs.replace(serving.source, local=""),), keys.generate(), 0.5
                )
            goodbye = await stage.daemon.expect(messages.Goodbye)
            assert (goodbye.failed, goodbye.notice) == (True, False)
            assert "cannot serve any more" in goodbye.reason
            stage.daemon.send(messages.GoodbyeAck())
            await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def test_an_engine_that_fails_in_an_unforeseen_way_is_dead_and_not_silent(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        await stage.daemon.tokens(1, 5)
        stage.engine.kill(KeyError("rope_type"))
        goodbye = await stage.daemon.expect(messages.Goodbye)
        assert (kind_of(goodbye.reason), goodbye.failed) == ("KeyError at stage.py", True)
        stage.daemon.send(messages.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def test_a_request_that_breaks_the_engine_kills_it_and_not_the_sample_alone(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 10, prompt=(667,))
        goodbye = await stage.daemon.expect(messages.Goodbye)
        assert (kind_of(goodbye.reason), goodbye.failed) == ("TypeError at stage.py", True)
        stage.daemon.send(messages.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def test_an_engine_that_cannot_be_built_for_an_unforeseen_reason_ends_the_worker(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        async def build(_spec: EngineSpec, _host: EngineHost) -> Scripted:
            raise IndexError("no device 3")

        stage.build = build  # type: ignore[method-assign]
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        goodbye = await stage.daemon.expect(messages.Goodbye)
        assert (kind_of(goodbye.reason), goodbye.failed) == ("IndexError at test_worker_ends.py", True)

    play(scene)


def test_a_refused_worker_ends_with_78_and_tells_the_remedy(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(messages.WorkerHello)
        stage.daemon.send(messages.Rejected("protocol 1 is too old", "update the worker"))
        end = await stage.ends(EXIT_REFUSED)
        assert (end.reason, end.remedy) == ("protocol 1 is too old", "update the worker")

    play(scene)


def test_an_engine_that_twice_holds_other_weights_than_came_ends_with_70(play: Play) -> None:
    """As vLLM says it after reading them back: drained by the daemon after its five tries it would end with 0, and no node be blamed."""

    async def scene(stage: Stage) -> None:
        async def load(version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
            raise WeightsDiffer(f"version {version} does not sit in the engine as published")

        await stage.ready()
        stage.engine.load = load  # type: ignore[method-assign]
        for _ in range(2):
            stage.use(2)
            failed = await stage.daemon.expect(messages.WeightsFailed)
            assert failed.refused
        goodbye = await stage.daemon.expect(messages.Goodbye)
        assert (goodbye.reason, goodbye.failed) == (failed.reason, True)
        stage.daemon.send(messages.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def test_an_engine_that_wakes_with_other_weights_ends_with_70_and_generates_nothing(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        async def wake() -> None:
            raise WeightsDiffer("the weights did not come out of sleep as they went into it")

        await stage.ready()
        stage.engine.wake = wake  # type: ignore[method-assign]
        stage.daemon.send(messages.Sleep(1))
        await stage.daemon.expect(messages.Asleep)
        stage.daemon.send(messages.Wake(2))
        stage.assign(1, 10)
        goodbye = await stage.daemon.expect(messages.Goodbye)
        assert ("did not come out of sleep" in goodbye.reason, goodbye.failed) == (True, True)
        assert stage.engine.requests == {}
        stage.daemon.send(messages.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)
