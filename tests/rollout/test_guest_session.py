"""A worker that is bounded by its host: what it gives back, when its engine sleeps, and what the daemon is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scavenger.protocol import keys
from scavenger.protocol import messages as wire
from scavenger.protocol.messages import Held
from scavenger.protocol.worker.events import (
    EXIT_PREEMPTED,
    EXIT_REFUSED,
    Abort,
    Add,
    Bounded,
    Build,
    Connected,
    Loaded,
    SleepEngine,
    Slept,
    WakeEngine,
    Woken,
)
from scavenger.protocol.worker.session import Session
from tests.rollout.daemon import FakeDaemon
from tests.rollout.stage import ME as PAIR
from tests.rollout.stage import SERVER
from tests.rollout.talk import LIMITS, ME, WELCOME, Talk, lease, of, sent


def guest() -> Talk:
    t = Talk()
    t.session = Session(dataclasses.replace(ME, guest=True), LIMITS, t.now)
    return t


def awake(lease_limit: int) -> Talk:
    """A guest with weights, whose host lets it have so many leases."""
    t = guest()
    t.do(Bounded(lease_limit))
    t.joined()
    return t


def beats(t: Talk) -> list[wire.Heartbeat]:
    return [m for m in sent(t.wait(0.0)) if isinstance(m, wire.Heartbeat)]


def test_before_its_host_says_a_number_it_takes_nothing_and_its_engine_sleeps() -> None:
    t = guest()
    (hello,) = sent(t.do(Connected()))
    assert isinstance(hello, wire.WorkerHello)
    assert hello.lease_limit == 0
    assert [type(a) for a in t.hear(WELCOME)[1:]] == [Build, SleepEngine]
    t.hear(wire.UseWeights(7, b"", ()))
    t.do(Loaded(7, b"root", 0.1, 0.1))
    assert sent(t.assign(lease(1))) == [wire.Yielded((Held(1, 1, 0),))]


def test_one_without_a_host_says_no_number() -> None:
    t = Talk()
    (hello,) = sent(t.do(Connected()))
    assert isinstance(hello, wire.WorkerHello)
    assert hello.lease_limit is None


def test_it_takes_as_many_as_its_host_lets_it_and_gives_the_others_back_untouched() -> None:
    t = awake(2)
    actions = t.assign(lease(1), lease(2, accepted=(8, 9)), lease(3, accepted=(5,)))
    assert len(of(Add, actions)) == 2
    assert sent(actions) == [wire.Yielded((Held(3, 1, 1),))]
    assert t.assign(lease(1)) == [], "a repeat is none too many"


def test_with_less_room_the_shortest_go_back_with_all_their_tokens_and_the_daemon_knows_at_once() -> None:
    t = awake(3)
    t.assign(lease(1), lease(2), lease(3))
    for sample, tokens in ((1, (4, 5)), (2, (6,)), (3, (7, 8, 9))):
        t.made(sample, *tokens)
    t.wait(0.2)  # a flush
    t.made(2, 10)
    t.made(1, 11)
    actions = t.do(Bounded(1))
    assert [type(m) for m in sent(actions)][:2] == [wire.Chunks, wire.Yielded], "all tokens, then the leases"
    assert [m.leases for m in sent(actions) if isinstance(m, wire.Yielded)] == [
        (Held(2, 1, 2), Held(1, 1, 3))
    ]
    assert [len(a.handles) for a in of(Abort, actions)] == [2]
    assert not of(SleepEngine, actions)
    assert [m.lease_limit for m in sent(actions) if isinstance(m, wire.Heartbeat)] == [1], (
        "not only with the next beat"
    )
    assert sent(t.do(Bounded(1))) == [], "the same number again is no news"


def test_with_no_room_the_engine_sleeps_and_wakes_with_the_next_and_no_order_is_acknowledged() -> None:
    t = awake(2)
    t.assign(lease(1))
    t.made(1, 4)
    actions = t.do(Bounded(0))
    (order,) = of(SleepEngine, actions)
    assert [m for m in sent(t.do(Slept(order.order, 5))) if isinstance(m, wire.Asleep | wire.Awake)] == []
    assert t.session.work.memory == "asleep"
    assert not of(SleepEngine, t.do(Bounded(0)))
    (back,) = of(WakeEngine, t.do(Bounded(2)))
    assert of(Add, t.assign(lease(2))), "the engine takes it behind the order to wake"
    t.do(Woken(back.order, 0.5, 7))
    assert t.session.work.memory == "awake"
    t.do(Slept(order.order, 5))
    assert t.session.work.memory == "awake", "of an order before"


def test_leases_that_wait_for_their_version_go_back_first() -> None:
    t = awake(3)
    t.hear(wire.UseWeights(8, b"", ()))
    t.assign(lease(1, version=8), lease(2, version=8))
    yielded = [m for m in sent(t.do(Bounded(1))) if isinstance(m, wire.Yielded)]
    assert yielded == [wire.Yielded((Held(1, 1, 0),))]
    assert len(of(Add, t.do(Loaded(8, b"root", 0.1, 0.1)))) == 1


@pytest.mark.parametrize(
    ("written", "said"),
    [(b"", b"hosts it has ended"), (b"three\n", b"one number of samples"), (b"9" * 99, b"too long")],
)
def test_a_worker_whose_host_ends_or_writes_nonsense_leaves(
    written: bytes, said: bytes, tmp_path: Path
) -> None:
    async def play() -> None:
        key = tmp_path / "worker.key"
        keys.write_keypair(key, PAIR)
        daemon = FakeDaemon(tmp_path, SERVER, {PAIR.public})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollout", "--state-dir", str(tmp_path), "--key", str(key)),
            *("--kind", "harvested", "--run", "run", "--guest"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                hello = await daemon.expect(wire.WorkerHello)
                assert (hello.kind, hello.lease_limit) == ("harvested", 0)
                process.stdin.write(b"4\n")
                while json.loads(await process.stdout.readline())["heard"] != 1:
                    pass
                process.stdin.write(written)
                process.stdin.close()
                _, log = await process.communicate()
            assert process.returncode == EXIT_PREEMPTED
            assert said in log
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
            daemon.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    "argv", [["--kind", "reserved", "--guest"], ["--kind", "harvested", "--memory-share", "2"]]
)
def test_arguments_that_no_guest_has_are_refused(argv: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "rollout", "--state-dir", "/s", "--key", "/k", "--run", "r", *argv],
        capture_output=True,
        check=False,
    )
    assert found.returncode == EXIT_REFUSED
