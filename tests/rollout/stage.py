"""A worker in this process with a scripted engine, and the daemon that it talks to over a real socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path

from rollout.engines.base import EngineHost, EngineInfo, Weight
from rollout.nodes import JobNode
from rollout.worker import Options, RolloutWorker
from scavenger.errors import EngineError
from scavenger.protocol import keys, messages
from scavenger.protocol.messages import EngineSpec, Lease, SampleKey, Sampling, pack_tokens
from scavenger.protocol.worker.events import (
    Delta,
    EndWorker,
    HearSiblings,
    Request,
    Speculated,
    WorkerIdentity,
    WorkerLimits,
)
from scavenger.weights import manifest as manifests
from scavenger.weights.source import WeightServer
from tests.rollout.daemon import FakeDaemon

SERVER, ME = keys.generate(), keys.generate()
WHO = WorkerIdentity("harvested", "run", "5e55", 0, 17, "node1", 1, "scripted", "0", 99)
SPEC = EngineSpec("scripted", "{}", "float64", 8, 128)
BEAT_S = 0.1
QUICK = WorkerLimits(hello_s=0.3, backoff_s=0.02, drain_s=1.0)
#: The fixture `play`: runs a test's coroutine on a stage.
Play = Callable[[Callable[["Stage"], Awaitable[None]]], None]


class Scripted:
    """An engine whose token at position p is 1000 + p; one token a request every `step_s`."""

    def __init__(self, step_s: float = 0.002) -> None:
        self.requests: dict[int, tuple[Request, int]] = {}
        self.calls: list[str] = []
        self.heard: list[HearSiblings] = []
        self.dead: Exception | None = None
        self._step_s = step_s
        self.gpu_nbytes = 0
        self._work = asyncio.Event()

    def info(self) -> EngineInfo:
        return EngineInfo("scripted", 8, 128, 2000, gpu_nbytes=self.gpu_nbytes)

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        self.requests.clear()
        weights = list(tensors)
        self.calls.append(f"load {version} {sum(len(t.data) for t in weights)}")
        if not summed:
            return b""
        from rollout.engines import merging  # needs torch, which a base install lacks

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

    async def bytes_held(self) -> list[int]:
        return [12, 500] if self.calls[-1:] == ["sleep"] else [4096]

    def progress(self) -> int:
        return 1

    def speculated(self) -> Speculated:
        return Speculated(7, 4, 2)

    async def hear(self, news: HearSiblings) -> None:
        self.heard.append(news)

    async def forget(self, run: str) -> None:
        self.requests.clear()
        self.calls.append(f"forget for {run}")

    async def close(self) -> None:
        self.calls.append("close")

    def kill(self, error: Exception) -> None:
        self.dead = error
        self._work.set()


class Stage:
    """A worker in this process, its engine, and the daemon that it talks to."""

    def __init__(self, tmp_path: Path, limits: WorkerLimits, here: JobNode | None = None) -> None:
        self.path = tmp_path
        self.engine = Scripted()
        self.daemon = FakeDaemon(tmp_path, SERVER, {ME.public})
        self.source = WeightServer()
        who = WHO if here is None else replace(WHO, gpus=here.nodes)
        options = Options(tmp_path, ME, who, limits, pull_s=2.0, started_at=time.monotonic(), here=here)
        self.rollout = RolloutWorker(options, builder=lambda _name: self.build)
        self.worker = asyncio.create_task(self.rollout.run())

    async def build(self, _spec: EngineSpec, _host: EngineHost) -> Scripted:
        return self.engine

    def welcome(self) -> None:
        self.daemon.send(
            messages.Welcome(1, self.daemon.generation, "run", SPEC, BEAT_S, 20.0, 8, relay=True)
        )

    def use(self, version: int, corrupt: bool = False) -> bytes:
        manifest, blob = manifests.build(
            version, {"w": ("float32", (256,), memoryview(bytes([version]) * 1024))}
        )
        if corrupt:
            blob[0] ^= 1
        source = self.source.publish(manifest, blob)
        self.daemon.send(messages.UseWeights(version, manifests.encode(manifest), (source,)))
        return manifest.root

    async def ready(self) -> None:
        await self.daemon.expect(messages.WorkerHello)
        self.welcome()
        root = self.use(1)
        loaded = await self.daemon.expect(messages.WeightsLoaded)
        assert (loaded.version, loaded.root) == (1, root)

    def assign(
        self,
        sample: int,
        most: int,
        epoch: int = 1,
        prompt: tuple[int, ...] = (1,),
        accepted: tuple[int, ...] = (),
    ) -> None:
        key = SampleKey("train", 0, sample, 0)
        self.daemon.send(
            messages.Assign(
                (Lease(sample, epoch, 1, pack_tokens(prompt), pack_tokens(accepted), Sampling(most), 0, key),)
            )
        )

    def restart_daemon(self) -> None:
        """Another socket, another port, another generation; nothing is remembered."""
        self.daemon.close()
        self.daemon = FakeDaemon(self.path, SERVER, {ME.public}, self.daemon.generation + 1)

    async def ends(self, code: int, within_s: float = 30.0) -> EndWorker:
        end = await asyncio.wait_for(self.worker, within_s)
        assert end.code == code
        return end


async def beat(stage: Stage, until: Callable[[messages.Heartbeat], bool] = lambda _beat: True) -> None:
    """Wait for a further heartbeat that says so."""
    async with asyncio.timeout(5.0):
        while True:
            count = len(stage.daemon.beats)
            while len(stage.daemon.beats) == count:
                await asyncio.sleep(BEAT_S / 4)
            if until(stage.daemon.beats[-1]):
                return


def kind_of(reason: str) -> str:
    """An unforeseen error's type and file, which is all that the daemon is told of it: its words may quote a prompt."""
    assert reason.endswith("(its own words are in the log of the process)")
    return reason.partition(":")[0]
