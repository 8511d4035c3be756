"""A worker process that changes hands: one run's worker after the other around one engine, over a real socket."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from rollout import hands
from rollout.engines.base import EngineHost
from rollout.worker import KeptEngine, Options, RolloutWorker
from scavenger.errors import EngineError
from scavenger.protocol import keys, messages
from scavenger.protocol.messages import EngineSpec, Lease, SampleKey, Sampling, pack_tokens
from scavenger.protocol.worker.events import (
    EXIT_DRAINED,
    EXIT_ENGINE_FAILED,
    EXIT_PREEMPTED,
    EndWorker,
    KeyRefused,
    Terminate,
    WorkerLimits,
)
from scavenger.weights import manifest as manifests
from scavenger.weights.source import WeightServer
from tests.rollout.daemon import FakeDaemon
from tests.rollout.stage import SERVER, SPEC, WHO, Scripted
from tests.rollout.talk import WELCOME, Talk, lease, of, sent

#: Slow enough for a busy machine: nothing here waits for a heartbeat or for a hello that goes unanswered.
LIMITS = WorkerLimits(hello_s=30.0, backoff_s=0.02, drain_s=10.0)
BEAT_S = 5.0
MINE, THEIRS = keys.generate("run", "scv-1"), keys.generate("theirs", "scv-1")
ORDER = messages.ChangeRun(THEIRS.public, "run theirs gains more")


# ---------------------------------------------------------------- the session


def test_a_worker_that_changes_hands_flushes_and_says_goodbye_first() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.made(1, 4, 5)
    assert [type(m) for m in sent(t.hear(ORDER))] == [messages.Chunks, messages.Goodbye]
    (end,) = of(EndWorker, t.hear(messages.GoodbyeAck()))
    assert (end.code, end.hands_to, end.reason) == (EXIT_DRAINED, THEIRS.public, ORDER.reason)


def test_a_repeated_order_changes_nothing_and_a_later_reason_to_end_stands_before_it() -> None:
    for event, code in ((Terminate("SIGTERM"), EXIT_PREEMPTED),):
        t = Talk().joined()
        t.hear(ORDER)
        assert sent(t.hear(ORDER)) == []
        t.do(event)
        (end,) = of(EndWorker, t.hear(messages.GoodbyeAck()))
        assert (end.code, end.hands_to) == (code, "")
    t = Talk().joined()
    t.hear(messages.Drain("a node is drained"))
    t.hear(ORDER)
    (end,) = of(EndWorker, t.hear(messages.GoodbyeAck()))
    assert (end.code, end.hands_to) == (EXIT_DRAINED, "")


def test_once_its_old_key_is_refused_it_goes_on_to_the_next_run_at_once() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.hear(ORDER)
    (end,) = of(EndWorker, t.do(KeyRefused("unknown key")))
    assert end.hands_to == THEIRS.public
    never = Talk().joined()
    never.hear(messages.HelloAgain("restarted"))
    assert not of(EndWorker, never.do(KeyRefused("unknown key"))), "any other worker tries again"


def test_without_an_acknowledgement_it_changes_hands_at_its_deadline() -> None:
    t = Talk().joined()
    t.assign(lease(1))
    t.hear(ORDER)
    (end,) = of(EndWorker, t.wait(t.session._limits.drain_s))
    assert end.hands_to == THEIRS.public
    assert WELCOME.run == "run"


# ---------------------------------------------------------------- the process


class Scene:
    """A process that works for one run after the other, its engines, and the daemon of both runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.key = path, path / "worker.key"
        keys.write_keypair(self.key, MINE)
        self.allowed = {MINE.public}
        self.daemon = FakeDaemon(path, SERVER, self.allowed)
        self.engines: list[Scripted] = []
        self.workers: list[RolloutWorker] = []
        self.between = 0
        self.source = WeightServer()
        options = Options(path, MINE, WHO, LIMITS, pull_s=20.0, started_at=time.monotonic())
        self.process = asyncio.create_task(
            hands.work(options, self.key, between=self.passed, new_worker=self.new_worker)
        )

    def passed(self) -> None:
        self.between += 1

    def new_worker(self, options: Options, kept: KeptEngine | None) -> RolloutWorker:
        self.workers.append(RolloutWorker(options, builder=lambda _name: self.build, kept=kept))
        return self.workers[-1]

    async def build(self, _spec: EngineSpec, _host: EngineHost) -> Scripted:
        self.engines.append(Scripted())
        return self.engines[-1]

    async def serve(
        self, run: str, worker_id: int, version: int, spec: EngineSpec = SPEC
    ) -> messages.WorkerHello:
        """Welcome the worker of a run, and have it load a version."""
        hello = await self.daemon.expect(messages.WorkerHello)
        assert hello.run == run
        self.daemon.send(messages.Welcome(worker_id, 1, run, spec, BEAT_S, 20.0, 8, relay=True))
        data = memoryview(bytes([version]) * 1024)
        manifest, blob = manifests.build(version, {"w": ("float32", (256,), data)})
        source = self.source.publish(manifest, blob)
        self.daemon.send(messages.UseWeights(version, manifests.encode(manifest), (source,)))
        loaded = await self.daemon.expect(messages.WeightsLoaded)
        assert loaded.version == version
        return hello

    def assign(self, sample: int, version: int, most: int = 100_000) -> None:
        one = Lease(
            sample, 1, version, pack_tokens((1,)), b"", Sampling(most), 0, SampleKey("train", 0, sample, 0)
        )
        self.daemon.send(messages.Assign((one,)))

    async def change(self) -> None:
        """The daemon's order, with the key where it says."""
        self.allowed.add(THEIRS.public)
        keys.write_keypair(self.key, THEIRS)
        self.daemon.send(ORDER)
        goodbye = await self.daemon.expect(messages.Goodbye)
        assert goodbye == messages.Goodbye(ORDER.reason, notice=False)
        self.allowed.discard(MINE.public)
        self.daemon.inbox.clear()  # what the first run's worker said is not the second's

    async def change_in_mid_sample(self) -> None:
        """From one run to the other while samples are under way; the second run is served then."""
        await self.serve("run", 1, 3)
        self.assign(1, 3)
        await self.daemon.tokens(1, 5)
        await self.change()
        self.daemon.send(messages.GoodbyeAck())
        await self.serve("theirs", 2, 1)

    def close(self) -> None:
        self.process.cancel()
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
                stage.close()

        asyncio.run(main())

    return run


def test_an_engine_works_for_the_next_run_under_a_new_key_and_session(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        first = await stage.serve("run", 1, 3)
        stage.assign(1, 3)
        await stage.daemon.tokens(1, 5)
        await stage.change()
        stage.daemon.send(messages.GoodbyeAck())
        then = await stage.serve("theirs", 2, 1)
        (engine,) = stage.engines
        assert "forget for theirs" in engine.calls
        assert engine.calls.index("forget for theirs") < engine.calls.index("load 1 1024")
        assert "close" not in engine.calls
        assert then.session != first.session
        assert (then.held, then.loaded_version, then.ledger) == ((), -1, "")
        assert (then.job_id, then.incarnation) == (first.job_id, first.incarnation)
        # A number that the first run's lease had is another sample's, and nothing that it made is told.
        stage.assign(1, 1, most=4)
        assert await stage.daemon.tokens(1, 4) == [1000, 1001, 1002, 1003]
        assert stage.between == 1
        stage.daemon.send(messages.Drain("surplus"))
        await stage.daemon.expect(messages.Goodbye)
        stage.daemon.send(messages.GoodbyeAck())
        end = await stage.process
        assert (end.code, end.hands_to) == (EXIT_DRAINED, "")
        assert engine.calls[-1] == "close"

    play(scene)


def test_the_worker_of_the_first_run_holds_nothing_when_the_second_begins(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        await stage.change_in_mid_sample()
        first, second = stage.workers
        assert not first._store._complete, "its weights are given back"
        assert not first._session.may_generate
        assert second._store is not first._store
        assert second._session.work is not first._session.work
        assert all(task.done() for task in first._tasks)

    play(scene)


def test_nothing_refers_to_the_worker_of_the_first_run_any_more(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        await stage.change_in_mid_sample()
        first = weakref.ref(stage.workers[0])
        del stage.workers[0]
        gc.collect()
        assert first() is None, gc.get_referrers(first())

    play(scene)


def test_the_key_file_is_waited_for_where_a_file_system_shows_it_late(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        await stage.serve("run", 1, 3)
        stage.allowed.add(THEIRS.public)
        stage.daemon.send(ORDER)
        await stage.daemon.expect(messages.Goodbye)
        stage.daemon.send(messages.GoodbyeAck())
        while not stage.between:
            await asyncio.sleep(0.01)
        assert "forget for theirs" not in stage.engines[0].calls
        keys.write_keypair(stage.key, THEIRS)
        await stage.serve("theirs", 2, 1)

    play(scene)


def test_a_key_that_never_comes_ends_the_process_as_drained(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hands, "KEY_S", 0.1)

    async def scene(stage: Scene) -> None:
        await stage.serve("run", 1, 3)
        stage.daemon.send(ORDER)
        await stage.daemon.expect(messages.Goodbye)
        stage.daemon.send(messages.GoodbyeAck())
        end = await stage.process
        assert end.code == EXIT_DRAINED
        assert "could not change hands" in end.reason
        assert stage.engines[0].calls[-1] == "close"

    play(scene)


def test_an_engine_that_cannot_forget_ends_its_process(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget(_self: Scripted, _run: str) -> None:
        raise EngineError("adapters are still there")

    monkeypatch.setattr(Scripted, "forget", forget)

    async def scene(stage: Scene) -> None:
        await stage.serve("run", 1, 3)
        await stage.change()
        stage.daemon.send(messages.GoodbyeAck())
        end = await stage.process
        assert (end.code, end.reason) == (EXIT_ENGINE_FAILED, "adapters are still there")

    play(scene)


def test_a_run_with_another_engine_gets_one_that_is_built_for_it(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        await stage.serve("run", 1, 3)
        await stage.change()
        stage.daemon.send(messages.GoodbyeAck())
        await stage.serve("theirs", 2, 1, structs.replace(SPEC, max_batch=2))
        first, second = stage.engines
        assert first.calls[-1] == "close"
        assert second.calls == ["load 1 1024"]

    play(scene)


def test_a_sigterm_while_it_changes_hands_leaves_for_good(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        await stage.serve("run", 1, 3)
        stage.daemon.answers = False
        await stage.change()
        stage.workers[0]._inbox.put_nowait(Terminate("SIGTERM"))
        stage.daemon.send(messages.GoodbyeAck())
        end = await stage.process
        assert (end.code, end.hands_to) == (EXIT_PREEMPTED, "")
        assert stage.engines[0].calls[-1] == "close"

    play(scene)


def test_a_job_that_changed_hands_comes_back_for_the_run_of_its_key() -> None:
    from rollout.__main__ import _of_key

    assert _of_key(WHO, THEIRS).run == "theirs"
    assert _of_key(replace(WHO, kind="reserved"), THEIRS).run == "run"
    assert _of_key(WHO, keys.generate()).run == "run"
