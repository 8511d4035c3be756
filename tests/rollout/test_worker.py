"""The worker against a real socket, in this process, with a scripted engine: samples, and a daemon that comes and goes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout.worker import Options, RolloutWorker
from scavenger.protocol import messages
from scavenger.protocol.messages import Held
from scavenger.protocol.worker.events import EXIT_ENGINE_FAILED, WorkerLimits
from tests.rollout.daemon import FakeDaemon
from tests.rollout.stage import BEAT_S, ME, SERVER, WHO, Play, Stage, beat


def test_a_sample_is_streamed_acked_and_let_go(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 30)
        assert await stage.daemon.tokens(1, 30) == list(range(1000, 1030))
        stage.daemon.beats.clear()
        await beat(stage)
        assert stage.daemon.beats[-1].held == (Held(1, 1, 30),)
        stage.daemon.send(messages.Ack((Held(1, 1, 30),)))
        await beat(stage, lambda beat: beat.held == ())
        assert stage.engine.calls == ["load 1 1024"]

    play(scene)


def test_a_restarted_daemon_gets_everything_above_the_durable_length(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        seen = await stage.daemon.tokens(1, 20)
        stage.daemon.send(messages.Ack((Held(1, 1, 10),)))
        await beat(stage)
        last = stage.daemon.beats[-1]
        assert (last.drafted, last.accepted, last.verifications) == (7, 4, 2), "as the engine says"
        stage.restart_daemon()
        hello = await stage.daemon.expect(messages.WorkerHello)
        assert (hello.session, hello.loaded_version) == ("5e55", 1)
        assert hello.held[0].length >= 20
        stage.welcome()
        chunk = (await stage.daemon.expect(messages.Chunks)).chunks[0]
        assert (chunk.epoch, chunk.offset) == (1, 10)
        assert list(messages.unpack_tokens(chunk.tokens))[: len(seen) - 10] == seen[10:]
        assert len(chunk.tokens) // 4 + 10 >= hello.held[0].length

    play(scene)


def test_a_daemon_that_forgot_the_connection_gets_another_registration(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        await stage.daemon.tokens(1, 5)
        stage.daemon.send(messages.HelloAgain("declared dead"))
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        stage.daemon.send(messages.Revoke(((1, 1),), "moved on"))
        await beat(stage, lambda beat: beat.held == ())
        assert stage.engine.requests == {}

    play(scene)


def test_a_silent_daemon_is_looked_for_again(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.daemon.answers = False
        hello = await stage.daemon.expect(messages.WorkerHello)
        assert hello.session == "5e55"
        assert len(stage.daemon.beats) >= 3

    play(scene)


def test_a_failed_sample_and_a_refused_one_are_reported(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(5, 10, prompt=(666,))
        failed = await stage.daemon.expect(messages.SampleFailed)
        assert (failed.sample_id, failed.epoch) == (5, 1)
        assert "too long" in failed.reason

    play(scene)


def test_sleep_and_wake_reach_the_engine_in_order(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.assign(1, 100_000)
        await stage.daemon.tokens(1, 5)
        stage.daemon.send(messages.Sleep(1))
        assert await stage.daemon.expect(messages.Asleep) == messages.Asleep(1, 512)
        assert stage.engine.requests == {}
        stage.daemon.send(messages.Wake(2))
        stage.assign(1, 40, epoch=2, accepted=(1000,))
        chunk = (await stage.daemon.expect(messages.Chunks)).chunks[0]
        while chunk.epoch != 2:
            chunk = (await stage.daemon.expect(messages.Chunks)).chunks[0]
        assert (chunk.offset, messages.unpack_tokens(chunk.tokens)[0]) == (1, 1001)
        assert stage.engine.calls[1:] == ["sleep", "wake"]
        assert await stage.daemon.expect(messages.Awake) == messages.Awake(2, 4096)

    play(scene)


@pytest.mark.parametrize(("gpu", "room"), [(17_000, True), (16_000, False)])
def test_an_engine_that_keeps_more_asleep_than_training_leaves_ends(play: Play, gpu: int, room: bool) -> None:
    """12 bytes are held of one GPU and 500 of the other: 3 % of 17,000 are 510, of 16,000 they are 480. What ends has given all back."""

    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.engine.gpu_nbytes = gpu
        stage.daemon.send(messages.Sleep(1))
        if room:
            assert await stage.daemon.expect(messages.Asleep) == messages.Asleep(1, 512)
            return
        goodbye = await stage.daemon.expect(messages.Goodbye)
        assert goodbye.failed
        assert "the engine sleeps and holds 0.0 GB" in goodbye.reason
        stage.daemon.send(messages.GoodbyeAck())
        await stage.ends(EXIT_ENGINE_FAILED)

    play(scene)


@pytest.mark.parametrize(
    "broken", ["rollout.worker.read_rendezvous", "scavenger.protocol.messages.decode_to_worker"]
)
def test_a_link_that_breaks_in_an_unforeseen_way_is_made_anew(
    play: Play, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        failures = []

        def fails(*_args: object) -> None:
            failures.append(1)
            raise KeyError("unforeseen")

        with monkeypatch.context() as patch:
            patch.setattr(broken, fails)
            if broken == "rollout.worker.read_rendezvous":
                stage.daemon.send(messages.Rejected("not open", "wait", retry=True))  # connect again
            while not failures:
                await asyncio.sleep(BEAT_S / 4)
        await stage.daemon.expect(messages.WorkerHello)
        stage.welcome()
        stage.assign(1, 10)
        assert await stage.daemon.tokens(1, 10) == list(range(1000, 1010))

    play(scene)


def test_a_daemon_that_comes_late_is_found(tmp_path: Path) -> None:
    async def main() -> None:
        options = Options(tmp_path, ME, WHO, WorkerLimits(backoff_s=0.02))
        worker = asyncio.create_task(RolloutWorker(options, builder=lambda _name: Stage.build).run())  # type: ignore[arg-type,return-value]
        await asyncio.sleep(0.1)
        with FakeDaemon(tmp_path, SERVER, {ME.public}) as daemon:
            await daemon.expect(messages.WorkerHello, 5.0)
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    asyncio.run(main())
