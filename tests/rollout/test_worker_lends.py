"""A worker process that lends slots: two workers of two runs around one engine, each over a connection and a key of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec import structs

from rollout import fetching
from rollout.engines.base import EngineHost, EngineInfo, Weight
from rollout.engines.registry import with_stops
from rollout.lending import Lending
from rollout.worker import Options, RolloutWorker
from scavenger.errors import EngineError
from scavenger.protocol import keys, messages
from scavenger.protocol.messages import EngineSpec, Lease, SampleKey, Sampling, pack_tokens
from scavenger.protocol.worker.events import (
    EXIT_DRAINED,
    EXIT_PREEMPTED,
    Delta,
    EndWorker,
    Request,
    Terminate,
    WorkerLimits,
)
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.engine_store import Store
from scavenger.weights.memory import Buffer
from scavenger.weights.source import WeightServer
from tests.rollout.daemon import FakeDaemon
from tests.rollout.stage import SERVER, SPEC, WHO, Scripted

M = TypeVar("M", bound=messages.Message)
#: Slow enough for a busy machine: nothing here waits for a heartbeat or for a hello that goes unanswered.
LIMITS = WorkerLimits(hello_s=30.0, backoff_s=0.02, drain_s=20.0, notice_s=20.0)
BEAT_S = 5.0
SHARED = structs.replace(SPEC, adapter_rank=2, shared=True)
INTENT = "scv-1"
HERS, HIS = keys.generate("hers", INTENT), keys.generate("his", f"{messages.LENT_INTENT}{INTENT}")
ORDER = messages.LendSlots(HIS.public, "his", 2, "samples of run his wait")
OVER = messages.LendSlots("", "", 0, "the loan is over")


class Sharing(Scripted):
    """Of a lane's requests the token at position p is 100 times the lane + p; of the lender's 1000 + p."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: dict[int, int] = {}  # handle -> lane
        self.loaded: set[int] = set()

    def info(self) -> EngineInfo:
        return EngineInfo("scripted", 8, 128, 2000)

    def borrowers(self) -> frozenset[int]:
        return frozenset(self.loaded)

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        others = {handle: one for handle, one in self.requests.items() if handle in self.lanes}
        found = await super().load(version, tensors, summed=summed)
        self.requests |= others
        return found

    async def load_beside(self, lane: int, tensors: Iterable[Weight]) -> None:
        self.calls.append(f"load beside {lane} {sum(len(one.data) for one in tensors)}")
        self.loaded.add(lane)

    async def add_beside(self, lane: int, request: Request) -> None:
        if lane not in self.loaded:
            raise EngineError("the lane holds no weights")
        self.lanes[request.handle] = lane
        await self.add(request)

    async def drop(self, lane: int) -> None:
        self.calls.append(f"drop {lane}")
        self.loaded.discard(lane)
        await self.abort([handle for handle, of in self.lanes.items() if of == lane])

    async def next(self) -> list[Delta]:
        return [
            replace(one, token_ids=(100 * self.lanes[one.handle] + one.token_ids[0] - 1000,))
            if one.handle in self.lanes
            else one
            for one in await super().next()
        ]


class Daemon(FakeDaemon):
    """Speaks to a worker of each run, by the run of its hello."""

    def __init__(self, state_dir: Path, allowed: set[str]) -> None:
        self.peers: dict[str, bytes] = {}
        self.said: dict[str, list[messages.Message]] = {"hers": [], "his": []}
        self.lends: list[str] = []  # what her heartbeats said of the loan
        super().__init__(state_dir, SERVER, allowed)

    async def _receive(self) -> None:
        while True:
            peer, frame = await self._socket.recv_multipart()
            message = messages.decode_to_daemon(frame)
            if isinstance(message, messages.WorkerHello):
                self.peers[message.run] = peer
            run = next(name for name, of in self.peers.items() if of == peer)
            if isinstance(message, messages.Heartbeat):
                self.lends += [message.lends] if run == "hers" else []
                self.tell(run, messages.HeartbeatAck(self.generation))
            else:
                self.said[run].append(message)
            self._arrived.set()

    def tell(self, run: str, message: messages.Message) -> None:
        self._socket.send_multipart([self.peers[run], messages.encode(message)])

    async def hear(self, run: str, kind: type[M], timeout_s: float = 60.0) -> M:
        """The next message of this kind from the run's worker; those before it stay."""
        async with asyncio.timeout(timeout_s):
            while True:
                for at, message in enumerate(self.said[run]):
                    if isinstance(message, kind):
                        del self.said[run][at]
                        return message
                self._arrived.clear()
                await self._arrived.wait()

    async def tokens_of(self, run: str, sample: int, length: int) -> list[int]:
        """The sample's first tokens. Raises where a chunk of another sample comes over this connection."""
        have: list[int] = []
        while len(have) < length:
            for chunk in (await self.hear(run, messages.Chunks)).chunks:
                assert chunk.sample_id == sample, f"a token of sample {chunk.sample_id} came to run {run}"
                assert chunk.offset == len(have)
                have += messages.unpack_tokens(chunk.tokens)
        return have[:length]


class Scene:
    def __init__(self, path: Path) -> None:
        self.path, self.key = path, path / f"{INTENT}.key"
        keys.write_keypair(self.key, HERS)
        keys.write_keypair(keys.lent_key_path(self.key), HIS)
        self.allowed = {HERS.public, HIS.public}
        self.daemon = Daemon(path, self.allowed)
        self.engine = Sharing()
        self.source = WeightServer()
        who = replace(WHO, run="hers")
        lent_key = keys.lent_key_path(self.key)
        options = Options(
            path, HERS, who, LIMITS, pull_s=20.0, started_at=time.monotonic(), lent_key=lent_key
        )
        self.worker = RolloutWorker(options, builder=lambda _name: with_stops(self.build))
        self.process = asyncio.create_task(self.worker.run())

    async def build(self, _spec: EngineSpec, _host: EngineHost) -> Sharing:
        return self.engine

    def publish(self, run: str, version: int, shape: tuple[int, ...] = (256,)) -> None:
        data = memoryview(bytes([version]) * 1024)
        manifest, blob = manifests.build(version, {"w": ("float32", shape, data)})
        source = self.source.publish(manifest, blob)
        self.daemon.tell(run, messages.UseWeights(version, manifests.encode(manifest), (source,)))

    async def serve(
        self, run: str, version: int, spec: EngineSpec = SHARED, shape: tuple[int, ...] = (256,)
    ) -> messages.WorkerHello:
        hello = await self.daemon.hear(run, messages.WorkerHello)
        self.daemon.tell(run, messages.Welcome(1, 1, run, spec, BEAT_S, 20.0, 8, relay=run == "hers"))
        self.publish(run, version, shape)
        if spec is SHARED:
            loaded = await self.daemon.hear(run, messages.WeightsLoaded)
            assert loaded.version == version
        return hello

    def assign(self, run: str, sample: int, version: int, most: int = 100_000) -> None:
        one = Lease(
            sample, 1, version, pack_tokens((1,)), b"", Sampling(most), 0, SampleKey("train", 0, sample, 0)
        )
        self.daemon.tell(run, messages.Assign((one,)))

    async def both_at_work(self) -> messages.WorkerHello:
        """Sample 1 of hers and sample 2 of his, in mid-sample; returns his worker's hello."""
        await self.serve("hers", 3)
        self.assign("hers", 1, 3)
        self.daemon.tell("hers", ORDER)
        hello = await self.serve("his", 5)
        self.assign("his", 2, 5)
        assert await self.daemon.tokens_of("hers", 1, 5) == [1000, 1001, 1002, 1003, 1004]
        assert await self.daemon.tokens_of("his", 2, 5) == [100, 101, 102, 103, 104]
        return hello

    async def leaves(self, run: str) -> messages.Goodbye:
        goodbye = await self.daemon.hear(run, messages.Goodbye)
        self.daemon.tell(run, messages.GoodbyeAck())
        return goodbye

    async def close(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:  # the borrower too: nobody is left who hears its goodbye
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        self.daemon.close()
        self.source.close()


Play = Callable[[Callable[[Scene], Awaitable[None]]], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Callable[[Scene], Awaitable[None]]) -> None:
        async def main() -> None:
            stage = Scene(tmp_path)
            try:
                await scene(stage)
            finally:
                await stage.close()

        asyncio.run(main())

    return run


def test_two_runs_have_samples_in_one_engine_and_each_hears_of_its_own(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        hello = await stage.both_at_work()
        assert (hello.run, hello.lease_limit, hello.job_id) == ("his", 2, WHO.job_id)
        assert hello.session != stage.worker._options.identity.session
        assert stage.engine.calls == ["load 3 1024", "load beside 1 1024"], "one engine, built once"
        async with asyncio.timeout(30.0):
            while stage.daemon.lends[-1:] != [HIS.public]:
                await asyncio.sleep(0.05)

    play(scene)


def test_no_more_samples_than_slots_are_taken(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        await stage.both_at_work()
        stage.assign("his", 3, 5)
        stage.assign("his", 4, 5)
        back = await stage.daemon.hear("his", messages.Yielded)
        assert [held.sample_id for held in back.leases] == [4]

    play(scene)


def test_the_end_of_a_loan_disturbs_nothing_of_the_lender_and_another_may_follow(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        await stage.both_at_work()
        stage.daemon.tell("his", messages.Drain("samples of run hers wait"))
        assert not (await stage.leaves("his")).failed
        stage.daemon.tell("hers", OVER)
        async with asyncio.timeout(30.0):
            while stage.engine.calls[-1] != "drop 1":
                await asyncio.sleep(0.01)
        del stage.daemon.peers["his"]
        again = keys.generate("his", HIS.intent)
        for said in stage.daemon.said.values():  # of the loan before, too
            said.clear()
        keys.write_keypair(keys.lent_key_path(stage.key), again)
        stage.allowed.add(again.public)
        stage.daemon.tell("hers", structs.replace(ORDER, public_key=again.public))
        await stage.serve("his", 6)
        stage.assign("his", 7, 6, most=3)
        assert await stage.daemon.tokens_of("his", 7, 3) == [200, 201, 202]
        assert 1 in {request.key.prompt for request, _ in stage.engine.requests.values()}, "hers goes on"

    play(scene)


def ask_to_leave(stage: Scene, how: str) -> None:
    """The lender, by Slurm's notice or by its daemon."""
    if how == "notice":
        stage.worker._inbox.put_nowait(Terminate("SIGTERM"))
    else:
        stage.daemon.tell("hers", messages.Drain("its run has no demand"))


@pytest.mark.parametrize("leaves", ["notice", "drain"])
def test_where_the_lender_leaves_the_borrower_says_goodbye_with_all_its_tokens(
    play: Play, leaves: str
) -> None:
    async def scene(stage: Scene) -> None:
        await stage.both_at_work()
        ask_to_leave(stage, leaves)
        assert (await stage.leaves("his")).notice
        assert (await stage.leaves("hers")).notice is (leaves == "notice")
        end = await asyncio.wait_for(stage.process, 30.0)
        assert end.code == (EXIT_PREEMPTED if leaves == "notice" else EXIT_DRAINED)
        assert stage.engine.calls[-1] == "close"
        assert "drop 1" not in stage.engine.calls, (
            "no borrower waits for an engine that is about to be closed"
        )

    play(scene)


@pytest.mark.parametrize("leaves", ["notice", "drain"])
def test_a_borrower_whose_goodbye_is_never_answered_holds_the_lender_up_no_longer_than_its_bound(
    play: Play, leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "LIMITS", replace(LIMITS, drain_s=0.3, notice_s=0.3))

    async def scene(stage: Scene) -> None:
        await stage.both_at_work()
        ask_to_leave(stage, leaves)
        await stage.leaves("hers")
        end = await asyncio.wait_for(stage.process, 30.0)
        assert end.code == (EXIT_PREEMPTED if leaves == "notice" else EXIT_DRAINED)
        assert stage.engine.calls[-1] == "close"

    play(scene)


def test_a_borrower_whose_weights_fail_again_and_again_holds_up_no_token_of_the_lender(play: Play) -> None:
    """Half of its manifests are no manifests, in the others a tensor has thousands of sides, whose product would take the process for as
    long as one likes."""
    wide = manifests.Tensor("w", "uint8", (2**62,) * 20_000 + (0,), 0, 0)

    def order(version: int) -> messages.UseWeights:
        crafted = manifests.seal(version, (wide,), (), chunk_nbytes=manifests.chunk_nbytes_of(0))
        return messages.UseWeights(version, manifests.encode(crafted) if version % 2 else b"no", ())

    async def scene(stage: Scene) -> None:
        await stage.serve("hers", 3)
        stage.assign("hers", 1, 3)
        stage.daemon.tell("hers", ORDER)
        await stage.daemon.hear("his", messages.WorkerHello)
        stage.daemon.tell("his", messages.Welcome(1, 1, "his", SHARED, BEAT_S, 20.0, 8))
        for version in range(5, 15):
            stage.daemon.tell("his", order(version))
            failed = await stage.daemon.hear("his", messages.WeightsFailed)
            assert failed.version == version
            assert ("impossible place" if version % 2 else "not a manifest") in failed.reason
        assert await stage.daemon.tokens_of("hers", 1, 20) == [1000 + n for n in range(20)]
        assert not stage.process.done()
        stage.daemon.tell("his", messages.Drain("the loan is over"))
        assert not (await stage.leaves("his")).failed

    play(scene)


def test_a_borrower_whose_run_has_another_engine_is_turned_away_and_the_lender_goes_on(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        await stage.serve("hers", 3)
        stage.assign("hers", 1, 3)
        stage.daemon.tell("hers", ORDER)
        await stage.serve("his", 5, structs.replace(SHARED, max_batch=4))
        goodbye = await stage.leaves("his")
        assert goodbye.failed
        assert "another one than that whose slots it borrows" in goodbye.reason
        assert await stage.daemon.tokens_of("hers", 1, 5) == [1000, 1001, 1002, 1003, 1004]
        assert not [call for call in stage.engine.calls if "beside" in call or call == "close"]

    play(scene)


def announced(version: int, nbytes: int, adapter: manifests.Adapter | None) -> bytes:
    """The manifest of weights that no source has."""
    table, size = manifests.layout({"w": ("uint8", (nbytes,))}), manifests.chunk_nbytes_of(nbytes)
    hashes = tuple(bytes(16) for _ in range(-(-nbytes // size)))
    return manifests.encode(manifests.seal(version, table, hashes, chunk_nbytes=size, adapter=adapter))


def test_no_memory_is_taken_for_a_borrower_s_weights_that_are_too_large(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    get = Store.get

    def counted(store: Store, manifest: manifests.Manifest, *more: Any) -> Awaitable[Buffer]:
        fetched.append(manifest.version)
        return get(store, manifest, *more)

    monkeypatch.setattr(Store, "get", counted)
    hers = manifests.build(3, {"w": ("float32", (16, 16), memoryview(bytes(1024)))})[0]
    bound = fetching.WeightsBound.beside(hers, SHARED.adapter_rank)
    assert bound.base_nbytes == 1024 + files.MAX_TOKENIZER_NBYTES
    assert bound.adapter_nbytes == 2 * (16 + 16) * 8 + files.MAX_TOKENIZER_NBYTES
    of = manifests.Adapter(hers.root, 1.0, "float32")
    base = messages.BaseWeights(2, announced(2, bound.base_nbytes + 1, None), ())
    orders = [
        (5, announced(5, bound.base_nbytes + 1, None), None, "version 5 has", "of weights"),
        (6, announced(6, bound.adapter_nbytes + 1, of), None, "version 6 has", "of adapters"),
        (7, announced(7, 8, of), base, "version 2 has", "of weights"),
    ]

    async def scene(stage: Scene) -> None:
        await stage.serve("hers", 3, shape=(16, 16))
        stage.daemon.tell("hers", ORDER)
        await stage.daemon.hear("his", messages.WorkerHello)
        stage.daemon.tell("his", messages.Welcome(1, 1, "his", SHARED, BEAT_S, 20.0, 8))
        for version, manifest, beside, which, kind in orders:
            stage.daemon.tell("his", messages.UseWeights(version, manifest, (), base=beside))
            failed = await stage.daemon.hear("his", messages.WeightsFailed)
            assert failed.version == version
            assert failed.reason.startswith(which)
            assert kind in failed.reason
            assert "slots that another run lends take" in failed.reason
        assert fetched == [3]

    play(scene)


def test_a_borrower_that_comes_before_the_lender_s_weights_waits_for_them(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    bound = RolloutWorker._bound_beside

    def seen(worker: RolloutWorker, rank: int) -> Awaitable[fetching.WeightsBound]:
        waits.append(rank)
        return bound(worker, rank)

    monkeypatch.setattr(RolloutWorker, "_bound_beside", seen)

    async def scene(stage: Scene) -> None:
        await stage.daemon.hear("hers", messages.WorkerHello)
        stage.daemon.tell("hers", messages.Welcome(1, 1, "hers", SHARED, BEAT_S, 20.0, 8, relay=True))
        stage.daemon.tell("hers", ORDER)
        await stage.daemon.hear("his", messages.WorkerHello)
        stage.daemon.tell("his", messages.Welcome(1, 1, "his", SHARED, BEAT_S, 20.0, 8))
        stage.publish("his", 5)
        async with asyncio.timeout(30.0):
            while not waits:
                await asyncio.sleep(0.01)
        assert not stage.engine.calls
        stage.publish("hers", 3)
        assert (await stage.daemon.hear("his", messages.WeightsLoaded)).version == 5
        assert stage.engine.calls == ["load 3 1024", "load beside 1 1024"]

    play(scene)


def test_what_kills_the_engine_is_told_to_both_runs(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        await stage.both_at_work()
        stage.engine.kill(EngineError("no memory"))
        for run in ("his", "hers"):
            assert (await stage.leaves(run)).failed

    play(scene)


def test_an_engine_that_is_not_to_be_shared_lends_nothing(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        hello = await stage.daemon.hear("hers", messages.WorkerHello)
        assert hello.run == "hers"
        drafts = structs.replace(SHARED, speculation="group")
        stage.daemon.tell("hers", messages.Welcome(1, 1, "hers", drafts, 0.1, 20.0, 8))
        async with asyncio.timeout(30.0):
            while stage.worker._engine is None:
                await asyncio.sleep(0.01)
        stage.daemon.tell("hers", ORDER)
        async with asyncio.timeout(30.0):
            while stage.daemon.lends[-1:] != [HIS.public]:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(stage.worker._lending.end("done"), 30.0)
        assert "his" not in stage.daemon.peers

    play(scene)


class Leaving:
    """A borrower that leaves when the test says so, whatever it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.may_end = asyncio.Event()

    async def run(self) -> EndWorker:
        await self.may_end.wait()
        return EndWorker(EXIT_PREEMPTED, "told to")

    def leave(self, reason: str) -> None:
        self.told.append(reason)


class Lender(Sharing):
    def borrow(self, slots: int) -> Sharing:
        return self

    def recall(self) -> None: ...


@pytest.mark.parametrize("where", ["made", "run"])
def test_a_borrower_that_fails_in_an_unforeseen_way_gives_its_slots_back_and_the_next_loan_begins(
    tmp_path: Path, where: str
) -> None:
    key = tmp_path / "lent.key"
    keys.write_keypair(key, HIS)
    made: list[Leaving] = []

    class Failing(Leaving):
        async def run(self) -> EndWorker:
            raise OSError("too many open files")

    def new_borrower(*_of: object) -> Leaving:
        made.append(Failing() if not made else Leaving())
        if where == "made" and len(made) == 1:
            raise OSError("too many open files")
        return made[-1]

    async def main() -> None:
        lending, engine = Lending(key, new_borrower), Lender()
        lending.order(ORDER, engine, SHARED)
        assert lending._loan is not None
        await asyncio.wait_for(lending._loan, 30.0)
        assert engine.calls == ["close"], "of the borrower's part of it"
        lending.order(structs.replace(ORDER, reason="again"), engine, SHARED)
        async with asyncio.timeout(30.0):
            while len(made) == 1:
                await asyncio.sleep(0.01)
        made[1].may_end.set()
        await asyncio.wait_for(lending._loan, 30.0)

    asyncio.run(main())


@pytest.mark.parametrize("orders", [[OVER], [structs.replace(ORDER, slots=0)]])
def test_a_loan_that_was_ended_before_it_began_or_is_of_no_slots_never_begins(
    tmp_path: Path, orders: list[messages.LendSlots]
) -> None:
    key, second = tmp_path / "lent.key", keys.generate("his", HIS.intent)
    keys.write_keypair(key, HIS)
    made: list[Leaving] = []

    def new_borrower(*_of: object) -> Leaving:
        made.append(Leaving())
        return made[-1]

    async def main() -> None:
        lending, engine = Lending(key, new_borrower), Lender()
        lending.order(ORDER, engine, SHARED)
        async with asyncio.timeout(30.0):
            while not made:
                await asyncio.sleep(0.01)
        keys.write_keypair(key, second)
        for order in (structs.replace(ORDER, public_key=second.public), *orders):
            lending.order(structs.replace(order, reason="another order"), engine, SHARED)
        assert made[0].told == ["another order"] * 2
        made[0].may_end.set()
        assert lending._loan is not None
        await asyncio.wait_for(asyncio.wait((lending._loan,)), 30.0)
        assert len(made) == 1

    asyncio.run(main())
