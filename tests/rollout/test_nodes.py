"""An engine over several nodes: who is which, how the further ones join, load the same weights, and end with the first."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rollout import nodes
from rollout.engines.base import EngineHost, Weight
from rollout.headless import HeadlessNode, HeadlessOptions
from rollout.node_link import FurtherNodes
from rollout.nodes import EngineNodes, JobNode
from scavenger.errors import ConfigError, EngineError, WeightsError
from scavenger.protocol import keys, messages
from scavenger.protocol.messages import EngineSpec
from scavenger.protocol.worker.events import EXIT_CANNOT_START, EXIT_DRAINED, EXIT_ENGINE_FAILED
from tests.rollout.stage import ME, QUICK, SPEC, Scripted, Stage

SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SCAVENGER_JOB_ID": "41",
    "SCAVENGER_RESTART_COUNT": "3",
}


# ---------------------------------------------------------------- facts of the job


def test_each_process_of_a_job_knows_its_place_and_where_the_first_listens() -> None:
    first, second = (nodes.of_environment(2, SLURM | {"SLURM_PROCID": place}) for place in "01")
    assert (first.place, second.place, first.first) == (0, 1, "10.0.0.7")
    assert first.ports == second.ports, "they find each other by nothing else"
    again = nodes.of_environment(2, SLURM | {"SCAVENGER_RESTART_COUNT": "4"})
    assert not set(again.ports) & set(first.ports), "a life before it may still hold them"
    assert all(20_000 <= port < 32_000 for port in first.ports), "below what a kernel gives out"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_NTASKS": "1"}, "process 1 of 1 of an engine of 2 nodes"),
        ({"SLURM_PROCID": "2"}, "process 2 of 2"),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID='' is not a number"),
        ({"SLURM_LAUNCH_NODE_IPADDR": "gpu 1"}, "is no IPv4 address of the job's first node"),
    ],
)
def test_a_job_script_that_starts_it_otherwise_is_refused(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match="srun --nodes=N") as refused:
        nodes.of_environment(2, SLURM | changes)
    assert said in refused.value.cause


def test_vllm_is_told_of_the_nodes_as_its_own_executor_takes_them(tmp_path: Path) -> None:
    models = pytest.importorskip("tests.rollout.models", reason="the engines need the [trainer] extra")
    from rollout.engines.vllm import setup

    spread = EngineNodes(2, 1, "10.0.0.7", 29501)
    spec = models.spec(name="vllm", dtype="float32")
    _, _, config = setup.checked_config(spec)
    for gpu in (True, False):
        chosen = setup.arguments(spec, EngineHost("run", 8, nodes=spread), tmp_path, config, gpu)
        assert {name: chosen[name] for name in spread.arguments()} == {
            "nnodes": 2,
            "node_rank": 1,
            "master_addr": "10.0.0.7",
            "master_port": 29501,
            "distributed_executor_backend": "mp",
        }
        assert chosen["tensor_parallel_size"] == 8, "all GPUs of both nodes"
    with pytest.raises(EngineError, match="7 GPUs do not lie equally on the engine's 2 nodes"):
        setup.arguments(spec, EngineHost("run", 7, nodes=spread), tmp_path, config, True)


def test_a_further_node_takes_no_engine_that_computes_on_one() -> None:
    from rollout.headless import vllm_part

    with pytest.raises(EngineError, match="'scripted' computes on one node"):
        vllm_part(SPEC, EngineHost("run", 2))


# ---------------------------------------------------------------- both ends, on real sockets

_jobs = itertools.count(1)


class Part:
    """A further node's share of a scripted engine: what it was given, and whether it lives."""

    def __init__(self, spec: EngineSpec, host: EngineHost) -> None:
        self.spec, self.host = spec, host
        self.placed: dict[int, dict[str, bytes]] = {}
        self.forgotten = 0
        self.closed = False
        self.death = asyncio.Event()

    def place(self, version: int, views: Sequence[Weight]) -> None:
        self.placed[version] = {view.name: bytes(view.data) for view in views}

    def forget(self) -> None:
        self.forgotten += 1

    async def died(self) -> str:
        await self.death.wait()
        return "its rank 1 is gone"

    def close(self) -> None:
        self.closed = True


class Spread(Stage):
    """A stage whose worker is the first node of two."""

    def __init__(self, tmp_path: Path) -> None:
        self.hosts: list[EngineHost] = []
        self.parts: list[Part] = []
        self.first = JobNode(0, 2, "127.0.0.1", nodes.ports_of(next(_jobs), 0))
        super().__init__(tmp_path, QUICK, self.first)

    async def build(self, _spec: EngineSpec, host: EngineHost) -> Scripted:
        self.hosts.append(host)
        return self.engine

    def part(self, spec: EngineSpec, host: EngineHost) -> Part:
        self.parts.append(Part(spec, host))
        return self.parts[-1]

    def further(self, pair: keys.KeyPair = ME, **changes: float) -> HeadlessNode:
        here = replace(self.first, place=1)
        return HeadlessNode(HeadlessOptions(here, pair, "node2", **changes), build=self.part)


Scene = Callable[[Spread], Awaitable[None]]
PlaySpread = Callable[[Scene], None]


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[PlaySpread]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def play(scene: Scene) -> None:
        async def main() -> None:
            stage = Spread(tmp_path)
            try:
                await asyncio.wait_for(scene(stage), 60.0)
            finally:
                stage.worker.cancel()
                await asyncio.gather(stage.worker, return_exceptions=True)
                stage.source.close()
                stage.daemon.close()

        asyncio.run(main())

    yield play
    for number, handler in before.items():
        signal.signal(number, handler)


def test_both_nodes_load_the_same_verified_bytes_and_the_further_one_ends_with_the_first(
    spread: PlaySpread,
) -> None:
    async def scene(stage: Spread) -> None:
        further = asyncio.create_task(stage.further().run())
        await stage.ready()
        (part,), (host,) = stage.parts, stage.hosts
        assert host.nodes is not None
        assert part.host.nodes is not None
        assert (host.gpus, part.host.gpus) == (2, 2), "of the whole engine"
        assert (host.nodes.place, part.host.nodes.place) == (0, 1)
        assert host.nodes.port == part.host.nodes.port
        assert part.placed == {1: {"w": bytes([1]) * 1024}}
        stage.assign(1, most=3)
        await stage.daemon.expect(messages.Chunks)
        stage.use(2)
        while (await stage.daemon.expect(messages.WeightsLoaded)).version != 2:
            pass
        assert part.placed[2] == {"w": bytes([2]) * 1024}
        while part.forgotten < 2:  # what was laid out does not stay beside the engine's own
            await asyncio.sleep(0.01)
        stage.worker.cancel()
        assert await asyncio.wait_for(further, 15.0) == EXIT_DRAINED, "its code hides no worker's"
        assert part.closed

    spread(scene)


def test_weights_that_only_the_further_node_cannot_get_are_not_generated_with(spread: PlaySpread) -> None:
    async def scene(stage: Spread) -> None:
        further = stage.further()
        running = asyncio.create_task(further.run())
        await stage.ready()

        async def wrong(*_args: object) -> None:
            raise WeightsError("chunk 0 is not what its manifest says")

        further._store.get = wrong  # type: ignore[assignment]
        stage.use(2)
        failed = await stage.daemon.expect(messages.WeightsFailed)
        assert failed.version == 2
        assert "node2 of this engine: chunk 0 is not what its manifest says" in failed.reason
        assert 2 not in stage.parts[0].placed
        assert not any(call.startswith("load 2") for call in stage.engine.calls)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    spread(scene)


@pytest.mark.parametrize("how", ["killed", "its part died"])
def test_a_lost_node_ends_the_whole_engine(spread: PlaySpread, how: str) -> None:
    async def scene(stage: Spread) -> None:
        further = asyncio.create_task(stage.further().run())
        await stage.ready()
        if how == "killed":
            further.cancel()
        else:
            stage.parts[0].death.set()
        end = await stage.ends(EXIT_ENGINE_FAILED)
        assert "node2 of this engine" in end.reason
        if how == "killed":
            await asyncio.gather(further, return_exceptions=True)
        else:
            assert await further == EXIT_ENGINE_FAILED
        assert stage.parts[0].closed

    spread(scene)


def test_who_has_not_the_job_s_key_neither_joins_nor_is_joined(spread: PlaySpread) -> None:
    async def scene(stage: Spread) -> None:
        stranger = stage.further(keys.generate(), join_s=1.0)
        assert await stranger.run() == EXIT_CANNOT_START, "it found no first node with its key"
        assert not stage.parts
        assert not stage.worker.done(), "and disturbed none"

    spread(scene)


def test_sigterm_leaves_the_further_node_until_the_worker_is_gone_but_not_for_ever(
    spread: PlaySpread,
) -> None:
    async def scene(stage: Spread) -> None:
        lonely = stage.further(join_s=30.0)
        stage.worker.cancel()
        await asyncio.gather(stage.worker, return_exceptions=True)
        waits = asyncio.create_task(lonely.run())
        await asyncio.sleep(0.2)  # longer than it takes to begin
        lonely._told_to_leave()
        assert await asyncio.wait_for(waits, 20.0) == EXIT_DRAINED, "nobody needs it: at once"

    async def beside(stage: Spread) -> None:
        further = stage.further(leave_s=5.0)
        running = asyncio.create_task(further.run())
        await stage.ready()
        further._told_to_leave()
        await asyncio.sleep(0.3)  # the worker sends its last tokens meanwhile
        assert not running.done()
        assert await asyncio.wait_for(running, 30.0) == EXIT_DRAINED

    spread(scene)
    spread(beside)


def test_nodes_that_do_not_join_are_counted_in_the_error() -> None:
    async def main() -> None:
        here = JobNode(0, 3, "127.0.0.1", nodes.ports_of(next(_jobs), 0))
        first = FurtherNodes(here, ME, lambda _why: None, join_s=0.2)
        first.open()
        try:
            with pytest.raises(EngineError, match="2 of the engine's 3 nodes did not join within 0 s"):
                await first.start(SPEC, "run", 3)
        finally:
            await first.close()

    asyncio.run(main())
