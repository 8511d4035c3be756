"""The worker against a real socket: in process with a scripted engine, and as the real process with the reference engine."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import zmq

from rollout.engines.base import Delta, EngineInfo, Host, Request, Weight
from rollout.events import (
    EXIT_CANNOT_START,
    EXIT_DRAINED,
    EXIT_ENGINE_FAILED,
    EXIT_PREEMPTED,
    EXIT_REFUSED,
    Identity,
    Leave,
    Limits,
)
from rollout.worker import Options, Worker
from scavenger import __version__, keys, wire
from scavenger.errors import EngineError, WeightsError
from scavenger.weights import manifest as manifests
from scavenger.weights import source_zmq
from scavenger.weights.pull import pull
from scavenger.weights.source import WeightSource
from scavenger.wire import EngineSpec, Held, Lease, SampleKey, Sampling, pack_tokens
from tests.rollout.daemon import FakeDaemon

SERVER, ME = keys.generate(), keys.generate()
WHO = Identity("harvested", "run", "5e55", 0, 17, "node1", 1, "scripted", "0", 99)
SPEC = EngineSpec("scripted", "{}", "float64", 8, 128)
BEAT_S = 0.1
QUICK = Limits(hello_s=0.3, backoff_s=0.02, drain_s=1.0)


class Scripted:
    """An engine whose token at position p is 1000 + p; one token a request every `step_s`."""

    def __init__(self, step_s: float = 0.002) -> None:
        self.requests: dict[int, tuple[Request, int]] = {}
        self.calls: list[str] = []
        self.dead: Exception | None = None
        self._step_s = step_s
        self._work = asyncio.Event()

    def info(self) -> EngineInfo:
        return EngineInfo("scripted", 8, 128, 2000)

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        self.requests.clear()
        weights = list(tensors)
        self.calls.append(f"load {version} {sum(len(t.data) for t in weights)}")
        if not summed:
            return b""
        from rollout.engines import merging

        return merging.digest(weights, {weight.name: weight.name for weight in weights})

    async def add(self, request: Request) -> None:
        if request.prompt == (666,):
            raise EngineError("too long for the context")
        if request.prompt == (667,):
            raise TypeError("unsupported operand")
        self.requests[request.handle] = (request, len(request.accepted))
        self._work.set()

    async def abort(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.requests.pop(handle, None)

    async def next(self) -> list[Delta]:
        while True:
            if self.dead:
                raise self.dead
            if self.requests:
                break
            self._work.clear()
            await self._work.wait()
        await asyncio.sleep(self._step_s)
        deltas = []
        for handle, (request, position) in list(self.requests.items()):
            finish = "length" if position + 1 >= request.sampling.max_tokens else None
            deltas.append(Delta(handle, (1000 + position,), (-1.0,), (-2.0,), finish))
            self.requests[handle] = (request, position + 1)
            if finish:
                del self.requests[handle]
        return deltas

    async def sleep(self) -> None:
        self.requests.clear()
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")

    def progress(self) -> int:
        return 1

    async def close(self) -> None:
        self.calls.append("close")

    def kill(self, error: Exception) -> None:
        self.dead = error
        self._work.set()


class Stage:
    """A worker in this process, its engine, and the daemon that it talks to."""

    def __init__(self, tmp_path: Path, limits: Limits) -> None:
        self.path = tmp_path
        self.engine = Scripted()
        self.daemon = FakeDaemon(tmp_path, SERVER, {ME.public})
        self.source = WeightSource()
        options = Options(tmp_path, ME, WHO, limits, pull_s=2.0, started_at=time.monotonic())
        self.worker = asyncio.create_task(Worker(options, builder=lambda _name: self.build).run())

    async def build(self, _spec: EngineSpec, _host: Host) -> Scripted:
        return self.engine

    def welcome(self) -> None:
        self.daemon.send(wire.Welcome(1, self.daemon.generation, "run", SPEC, BEAT_S, 20.0, 8, relay=True))

    def use(self, version: int, corrupt: bool = False) -> bytes:
        manifest, blob = manifests.build(version, {"w": ("float32", (256,), memoryview(bytes([version]) * 1024))})
        if corrupt:
            blob[0] ^= 1
        source = self.source.publish(manifest, blob)
        self.daemon.send(wire.UseWeights(version, manifests.encode(manifest), (source,)))
        return manifest.root

    async def ready(self) -> None:
        await self.daemon.expect(wire.WorkerHello)
        self.welcome()
        root = self.use(1)
        loaded = await self.daemon.expect(wire.WeightsLoaded)
        assert (loaded.version, loaded.root) == (1, root)

    def assign(self, sample: int, most: int, epoch: int = 1, prompt: tuple[int, ...] = (1,), accepted: tuple[int, ...] = ()) -> None:
        key = SampleKey("train", 0, sample, 0)
        self.daemon.send(wire.Assign((Lease(sample, epoch, 1, pack_tokens(prompt), pack_tokens(accepted), Sampling(most), 0, key),)))

    def restart_daemon(self) -> None:
        """Another socket, another port, another generation; nothing is remembered."""
        self.daemon.close()
        self.daemon = FakeDaemon(self.path, SERVER, {ME.public}, self.daemon.generation + 1)

    async def ends(self, code: int, within_s: float = 30.0) -> Leave:
        leave = await asyncio.wait_for(self.worker, within_s)
        assert leave.code == code
        return leave


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


def test_an_engine_that_merges_otherwise_than_its_trainer_says_so_and_loads_again(play: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="merging needs torch")
    from rollout.engines import checksum, lora

    base, blob = manifests.build(1, {"a.weight": ("float32", (16, 8), memoryview(bytes(512)))})
    data = memoryview(bytearray(array("f", [3.0] * 32).tobytes()))
    tensors = {"a.lora_A.weight": ("float32", (2, 8), data[:64]), "a.lora_B.weight": ("float32", (16, 2), data)}
    plain, own = manifests.build(2, tensors, adapter=manifests.Adapter(base.root, 0.5, "bfloat16"))
    right = checksum.digest({"a.weight": checksum.checksum(torch.full((16, 8), 9.0, dtype=torch.bfloat16))})
    manifest = msgspec.structs.replace(plain, merged=right)

    async def scene(stage: Stage) -> None:
        await stage.daemon.expect(wire.WorkerHello)
        stage.welcome()
        under = wire.BaseWeights(1, manifests.encode(base), (stage.source.publish(base, blob),))
        order = wire.UseWeights(2, manifests.encode(manifest), (stage.source.publish(manifest, own),), base=under)
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
        assert (kind_of(goodbye.reason), goodbye.failed) == ("KeyError at test_worker.py", True)
        stage.daemon.send(wire.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


def test_a_request_that_breaks_the_engine_kills_it_and_not_the_sample_alone(play: Run) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 10, prompt=(667,))
        goodbye = await stage.daemon.expect(wire.Goodbye)
        assert (kind_of(goodbye.reason), goodbye.failed) == ("TypeError at test_worker.py", True)
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


# ---------------------------------------------------------------- the real process


@pytest.fixture
def program() -> Iterator[ModuleType]:
    """`rollout.__main__`, whose import sets a handler for SIGTERM that is not for this process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield importlib.import_module("rollout.__main__")
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("kind", "argv", "environment", "slot"),
    [
        ("reserved", [], {}, ""),
        ("reserved", [], {"SCAVENGER_SLOT": "e1"}, "e1"),
        ("reserved", ["--slot", "e2"], {"SCAVENGER_SLOT": "e1"}, "e2"),
        ("harvested", [], {"SCAVENGER_SLOT": "e1"}, ""),
    ],
)
def test_only_a_reserved_engine_has_a_slot(program: ModuleType, kind: str, argv: list[str], environment: dict[str, str], slot: str) -> None:
    arguments = program._arguments(["--state-dir", "/s", "--key", "/k", "--kind", kind, "--run", "run", *argv])
    assert program.identity(arguments, environment).slot == slot


def test_a_slot_for_a_harvested_engine_is_refused(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program._arguments(["--state-dir", "/s", "--key", "/k", "--kind", "harvested", "--run", "run", "--slot", "e1"])
    assert "reserved engines" in capsys.readouterr().err


def test_a_job_that_was_submitted_for_another_release_is_refused(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it reads its key or asks the daemon anything."""
    argv = ["--state-dir", str(tmp_path), "--key", "/none", "--kind", "harvested", "--run", "run", "--code", "0.0.1"]
    assert program.main(argv, {}) == EXIT_REFUSED
    said = capsys.readouterr().err
    assert f"submitted for release 0.0.1, and {sys.executable} has release {__version__}" in said
    assert "\n  remedy: restart the daemon after an upgrade" in said
    program.check_code(__version__)
    program.check_code("")


@pytest.mark.parametrize(
    ("key", "environment", "said"),
    [("/not-mounted/worker.key", {}, "does not exist"), ("", {"SCAVENGER_GPUS": "two"}, "is not a number")],
)
def test_a_worker_that_lacks_something_where_it_runs_was_not_refused(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, environment: dict[str, str], said: str
) -> None:
    """That may be so on this node alone, which is to be seen by the exit code."""
    path = key or str(_key_file(tmp_path, ME))
    argv = ["--state-dir", str(tmp_path), "--key", path, "--kind", "harvested", "--run", "run", "--code", __version__]
    assert program.main(argv, environment) == EXIT_CANNOT_START
    assert said in capsys.readouterr().err


def test_arguments_of_a_later_release_are_refused_as_its_jobs_are(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 would be held against the node."""
    with pytest.raises(SystemExit) as left:
        program.main(["--state-dir", "/s", "--key", "/k", "--kind", "harvested", "--run", "run", "--of-tomorrow", "1"], {})
    assert left.value.code == EXIT_REFUSED
    said = capsys.readouterr().err
    assert "--of-tomorrow" in said
    assert f"{sys.executable} has {__version__}" in said


@asynccontextmanager
async def process(state_dir: Path, key: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = ["-m", "rollout", "--state-dir", str(state_dir), "--key", str(key), "--kind", "harvested", "--run", "run"]
    facts = {"SCAVENGER_JOB_ID": "17", "SCAVENGER_RESTART_COUNT": "2", "SCAVENGER_NODE": "node3", "SCAVENGER_GPUS": "1"}
    started = await asyncio.create_subprocess_exec(
        sys.executable, *argv, env={**os.environ, **facts, "OMP_NUM_THREADS": "1"}, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


def _key_file(tmp_path: Path, pair: keys.KeyPair) -> Path:
    path = tmp_path / "worker.key"
    keys.write_keypair(path, pair)
    return path


def test_the_process_survives_sigstop_and_leaves_on_sigterm_in_time(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the reference engine needs the [trainer] extra")
    from tests.rollout import models

    model = models.plain_model(models.config_text())
    manifest, blob = models.weights(model)
    spec = models.spec(context=500)

    async def main() -> None:
        with FakeDaemon(tmp_path, SERVER, {ME.public}) as daemon, WeightSource() as source:
            async with process(tmp_path, _key_file(tmp_path, ME)) as worker:
                hello = await daemon.expect(wire.WorkerHello)
                assert (hello.job_id, hello.incarnation, hello.node, hello.gpus, hello.pid) == (17, 2, "node3", 1, worker.pid)
                daemon.send(wire.Welcome(1, 1, "run", spec, 0.2, 20.0, 8))
                daemon.send(wire.UseWeights(1, manifests.encode(manifest), (source.publish(manifest, blob),)))
                await daemon.expect(wire.WeightsLoaded, 60.0)
                leases = [
                    Lease(i, 1, 1, pack_tokens((1, 2)), b"", Sampling(400), 3, SampleKey("train", 0, i, 0)) for i in range(16)
                ]  # fmt: skip
                daemon.send(wire.Assign(tuple(leases)))
                await daemon.tokens(0, 20)
                worker.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.8)
                daemon.inbox.clear()
                worker.send_signal(signal.SIGCONT)
                await daemon.expect(wire.Chunks)  # goes on, on the same connection
                assert not any(isinstance(m, wire.WorkerHello) for m in daemon.inbox)
                began = time.monotonic()
                worker.send_signal(signal.SIGTERM)
                goodbye = await daemon.expect(wire.Goodbye)
                assert (goodbye.reason, goodbye.notice) == ("SIGTERM", True)
                assert await worker.wait() == EXIT_PREEMPTED  # the daemon never acks
                assert time.monotonic() - began < 1.0
                assert worker.stderr is not None
                log = (await worker.stderr.read()).decode()
                assert ME.secret not in log
                assert "worker.left" in log

    asyncio.run(main())


def test_a_wrong_key_ends_the_process_with_78(tmp_path: Path) -> None:
    async def main() -> None:
        with FakeDaemon(tmp_path, SERVER, {ME.public}):
            async with process(tmp_path, _key_file(tmp_path, keys.generate())) as worker:
                assert await asyncio.wait_for(worker.wait(), 90.0) == EXIT_REFUSED
                assert worker.stderr is not None
                assert b"does not accept this worker's key" in await worker.stderr.read()

    asyncio.run(main())


def test_a_key_that_others_can_read_ends_the_process_with_72_and_its_remedy(tmp_path: Path) -> None:
    async def main() -> None:
        key = _key_file(tmp_path, ME)
        key.chmod(0o644)
        async with process(tmp_path, key) as worker:
            assert await asyncio.wait_for(worker.wait(), 90.0) == EXIT_CANNOT_START
            assert worker.stderr is not None
            assert b"chmod 600" in await worker.stderr.read()

    asyncio.run(main())
