"""Environment workers in jobs of their own: who may join, who is lost, and what becomes of what they played. Real sockets and processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from scavenger import __version__
from scavenger.protocol import keys
from tests.trainer.episodes.test_pool import PROGRAM, SETUP, all_of, ask
from trainer.episodes import remote, remote_worker, wire
from trainer.episodes.pool import EnvironmentPool
from trainer.episodes.remote import Gone, Happened, Joined, Sessions, Tell

HELLO = wire.encode(wire.Hello(__version__, "cn01", "17"))
#: Tells its folder who plays what, and plays a "long" episode for as long as it is the one that is held.
PLAY = """
open(os.path.join({folder!r}, "playing-" + ask.episode + "-" + os.environ.get("PLAYER", "local")), "w").close()
    while ask.episode == "long" and os.environ.get("PLAYER") == "held" and os.getppid() == parent:
        time.sleep(0.05)
    tell(wire.Played(ask.episode, float(ask.seed)))
"""
JOB = """
import asyncio, contextlib, os, sys
from pathlib import Path
from trainer.episodes import remote_worker

class Stub:
    endpoint, starts = "http://127.0.0.1:1", 1
    def check(self): ...

remote_worker.ENDING_S = 0.2  # what plays here does not hear that its pipe is closed
worker = remote_worker.RemoteWorker(Path(sys.argv[1]), wait_s=float(sys.argv[3]), argv=(sys.argv[2],), beat_s=0.1, lease_s=1.0,
                gateway=lambda access: contextlib.nullcontext(Stub()))
sys.exit(asyncio.run(remote_worker._run(worker)))
"""


# ---------------------------------------------------------------- who is there; pure


def sessions(**more: int) -> Sessions:
    numbers = iter(range(100))
    return Sessions(more.pop("most", 2), lambda: next(numbers), lease_s=10.0, release=__version__, **more)


def refused(action: remote.Action) -> wire.Refused:
    assert isinstance(action, Tell)
    assert isinstance(action.message, wire.Refused)
    return action.message


def test_a_worker_joins_once_and_what_it_says_carries_its_number() -> None:
    known = sessions()
    assert known.heard(b"a", HELLO, 0.0) == [Happened(0, Joined("cn01 job 17"))]
    assert known.heard(b"a", HELLO, 0.0) == []
    played = wire.Played("e", 1.0)
    assert known.heard(b"a", wire.encode(played), 1.0) == [Happened(0, played)]
    assert known.heard(b"a", wire.encode(wire.Goodbye("told")), 2.0) == [Happened(0, Gone("told", False))]
    assert known.routes == []


def test_one_that_is_silent_for_its_lease_is_gone_and_what_it_says_later_is_refused() -> None:
    known = sessions()
    known.heard(b"a", HELLO, 0.0)
    known.heard(b"b", HELLO, 0.0)
    known.heard(b"b", wire.encode(wire.Alive()), 5.0)
    [lost] = known.silent(10.5)
    assert lost == Happened(0, Gone("it was silent for 10 s", True))
    [told] = known.heard(b"a", wire.encode(wire.Played("e")), 11.0)
    assert refused(told).again


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (wire.encode(wire.Ready()), "Ready before Hello"),
        (b"\xc1", "not a message"),
        (wire.encode(wire.Hello("0.0.1", "cn01")), "release 0.0.1"),
        (wire.encode(wire.Hello(__version__, "x" * (1 << 17))), "over the limit"),
        (wire.encode(wire.Hello(__version__, "x" * 300)), "not a message"),
    ],
)
def test_who_does_not_begin_with_a_fitting_hello_gets_nothing(frame: bytes, why: str) -> None:
    known = sessions()
    [told] = known.heard(b"a", frame, 0.0)
    assert why in refused(told).reason
    assert known.routes == []


def test_no_more_join_than_the_run_allows() -> None:
    known = sessions(most=1)
    known.heard(b"a", HELLO, 0.0)
    [told] = known.heard(b"b", HELLO, 0.0)
    assert "environment_jobs" in refused(told).reason
    assert refused(told).again, "it may be the one that holds the place, whose connection broke"


@pytest.mark.parametrize(
    "frame",
    [
        wire.encode(wire.Played("e", output="x" * 5000)),
        b"\xc1",
        msgspec.msgpack.encode({"type": "played", "episode": "e", "calls": ["0.0"], "versions": []}),
        msgspec.msgpack.encode({"type": "played", "episode": "e", "reward": float("nan")}),
    ],
)
def test_a_worker_that_says_what_cannot_be_read_has_no_session_any_more(frame: bytes) -> None:
    known = sessions(most_bytes=4096)
    known.heard(b"a", HELLO, 0.0)
    told, gone = known.heard(b"a", frame, 0.0)
    assert not refused(told).again
    assert isinstance(gone, Happened)
    assert isinstance(gone.event, Gone)
    assert gone.event.failed
    assert known.routes == []


# ---------------------------------------------------------------- the socket


def pool_with_jobs(folder: Path, play: str = "", **more: int) -> EnvironmentPool:
    """One process of its own, and up to two workers in jobs."""
    program = folder / "worker.py"
    played = (play or PLAY).format(folder=str(folder))
    program.write_text(textwrap.dedent(PROGRAM).format(play=played.strip(), before="parent = os.getppid()"))
    settings = remote.PortSettings(
        folder / remote.FILE,
        2,
        "r",
        ("run.toml",),
        str(folder),
        sys.executable,
        "127.0.0.1",
        beat_s=0.1,
        lease_s=more.pop("lease_s", 1),
        most_bytes=more.pop("most_bytes", 1 << 20),
    )
    return EnvironmentPool(
        SETUP,
        argv=(str(program),),
        python=Path(sys.executable),
        say=lambda line: None,
        jobs=settings,
        concurrency=1,
        **more,
    )


@contextmanager
def a_job(folder: Path, player: str = "job", wait_s: float = 60.0) -> Iterator[subprocess.Popen[bytes]]:
    """An environment worker as in a job."""
    script = folder / "job.py"
    script.write_text(JOB)
    argv = [sys.executable, str(script), str(folder / remote.FILE), str(folder / "worker.py"), str(wait_s)]
    environ = os.environ | {"PLAYER": player, "SLURMD_NODENAME": "cn01", "SLURM_JOB_ID": "17"}
    process = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def until(one: EnvironmentPool, true: Callable[[], bool], seconds: float = 30.0) -> list[wire.Played]:
    """What was played until it is true."""
    found: list[wire.Played] = []
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        found += one.poll(0.05)
    return found


def connected(access: remote.WorkerAccess, public: str, secret: str) -> zmq.Socket[bytes]:
    link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    link.setsockopt(zmq.LINGER, 0)
    link.setsockopt(zmq.RECONNECT_IVL, -1)
    keys.secure(link, access.server_key, keys.KeyPair(public, secret))
    link.connect(access.endpoint)
    link.send(HELLO)
    return link


def test_another_key_opens_nothing_and_the_file_s_key_does(tmp_path: Path) -> None:
    with pool_with_jobs(tmp_path) as one:
        access = one.access
        assert access is not None
        assert (tmp_path / remote.FILE).stat().st_mode & 0o777 == 0o600
        assert access.secret not in repr(access)
        other = keys.generate()
        stranger = connected(access, other.public, other.secret)
        known = connected(access, access.public, access.secret)
        assert not one.poll(0.3)
        assert known.poll(5000)
        assert isinstance(wire.to_remote(known.recv()), wire.Setup)
        assert not stranger.poll(300), "who has another key hears nothing"
        known.send(wire.encode(wire.Ready(3, "digest", "version")))
        until(one, lambda: one.joined == ["cn01 job 17"])
        stranger.close()
        known.close()
    assert not (tmp_path / remote.FILE).exists()


def test_a_message_that_is_too_large_ends_the_connection_and_its_episode_is_played_elsewhere(
    tmp_path: Path,
) -> None:
    with pool_with_jobs(tmp_path, most_bytes=100_000, lease_s=30) as one:
        access = one.access
        assert access is not None
        link = connected(access, access.public, access.secret)
        until(one, lambda: bool(link.poll(0)))
        link.send(wire.encode(wire.Ready(3, "digest", "version")))
        until(one, lambda: bool(one.joined))
        for name in ("first", "second"):
            one.play(ask(name))
        link.send(wire.encode(wire.Played("second", output="x" * 200_000)))
        found = all_of(one, 2, 20.0)
        assert sorted(p.episode for p in found) == ["first", "second"]
        assert {p.output for p in found} == {""}
        assert (one.joined, one.losses, one.resumed) == ([], 1, 1)
        link.close()


def test_another_environment_than_the_run_s_may_not_play(tmp_path: Path) -> None:
    with pool_with_jobs(tmp_path) as one:
        access = one.access
        assert access is not None
        link = connected(access, access.public, access.secret)
        until(one, lambda: bool(link.poll(0)))
        link.recv()
        link.send(wire.encode(wire.Ready(3, "another", "version")))
        heard: list[wire.ToRemote] = []

        def was_refused() -> bool:
            while link.poll(0):
                heard.append(wire.to_remote(link.recv()))
            return any(isinstance(m, wire.Refused) and "task set" in m.reason for m in heard)

        until(one, was_refused)
        assert one.joined == []
        link.close()


def test_one_that_turns_into_another_environment_loses_no_episode(tmp_path: Path) -> None:
    with pool_with_jobs(tmp_path, lease_s=30) as one:
        access = one.access
        assert access is not None
        link = connected(access, access.public, access.secret)
        until(one, lambda: bool(link.poll(0)))
        link.send(wire.encode(wire.Ready(3, "digest", "version")))
        until(one, lambda: bool(one.joined))
        for name in ("first", "second"):
            one.play(ask(name))
        link.send(wire.encode(wire.Ready(3, "another", "version")))
        assert sorted(p.episode for p in all_of(one, 2, 20.0)) == ["first", "second"]
        assert (one.joined, one.under_way) == ([], 0)
        link.close()


def test_a_port_whose_file_cannot_be_written_listens_to_nobody(tmp_path: Path) -> None:
    (tmp_path / "no-folder").write_text("")
    settings = remote.PortSettings(
        tmp_path / "no-folder" / remote.FILE, 2, "r", (), "", sys.executable, "127.0.0.1"
    )
    with pytest.raises(OSError, match="no-folder"):
        remote.WorkerPort(settings, lambda number, event: None, lambda: 0)
    assert "environment workers" not in [one.name for one in threading.enumerate()]


def test_workers_in_jobs_play_beside_the_run_s_own(tmp_path: Path) -> None:
    with pool_with_jobs(tmp_path) as one, a_job(tmp_path) as job:
        until(one, lambda: bool(one.joined))
        for number in range(6):
            one.play(ask(f"e{number}", number))
        found = all_of(one, 6)
        assert sorted((p.episode, p.reward) for p in found) == [(f"e{n}", float(n)) for n in range(6)]
        assert {p.worker for p in found} == {"cn01 job 17", socket.gethostname()}
        one.close()
        job.terminate()
        assert job.wait(20) == 75


def held(one: EnvironmentPool, folder: Path) -> None:
    """The job plays "long", and the run's own process has played "short"."""
    until(one, lambda: bool(one.joined))
    one.play(ask("short"))  # to the run's own, whose number is lower
    one.play(ask("long", 5))
    found = all_of(one, 1) + until(one, (folder / "playing-long-held").exists)
    assert [p.episode for p in found] == ["short"]


def test_one_that_is_told_to_leave_says_goodbye_and_its_episode_goes_to_another(tmp_path: Path) -> None:
    with pool_with_jobs(tmp_path, lease_s=60) as one, a_job(tmp_path, "held") as job:
        held(one, tmp_path)
        job.terminate()
        [played] = all_of(one, 1)
        assert (played.episode, played.reward, played.worker) == ("long", 5.0, socket.gethostname())
        assert job.wait(20) == 75
        assert (one.losses, one.resumed, one.joined) == (1, 1, [])


def test_one_that_is_silent_is_lost_and_may_join_again(tmp_path: Path) -> None:
    with pool_with_jobs(tmp_path) as one, a_job(tmp_path, "held") as job:
        held(one, tmp_path)
        job.send_signal(signal.SIGSTOP)
        [played] = all_of(one, 1)
        assert (played.episode, played.worker) == ("long", socket.gethostname())
        assert one.losses == 1
        job.send_signal(signal.SIGCONT)
        until(one, lambda: one.joined == ["cn01 job 17"])


def test_one_waits_for_the_next_training_job(tmp_path: Path) -> None:
    with pool_with_jobs(tmp_path) as one, a_job(tmp_path):
        until(one, lambda: bool(one.joined))
        one.close()
        with pool_with_jobs(tmp_path) as following:
            until(following, lambda: bool(following.joined))


def test_one_ends_when_no_next_training_job_comes(tmp_path: Path) -> None:
    with pool_with_jobs(tmp_path) as one, a_job(tmp_path, wait_s=5.0) as job:
        until(one, lambda: bool(one.joined))
        one.close()
        assert job.wait(60) == 69


def test_one_that_joins_while_rank_0_is_busy_waits_for_it_and_is_not_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps, while it publishes and writes a checkpoint, rank 0 looks at no event."""
    monkeypatch.setattr(remote_worker, "ANSWER_S", 2.0)
    happened: list[remote.Event] = []
    settings = remote.PortSettings(
        tmp_path / remote.FILE, 2, "r", (), "", sys.executable, "127.0.0.1", beat_s=0.1, lease_s=2.0
    )
    port = remote.WorkerPort(settings, lambda number, event: happened.append(event), lambda: 0)

    async def joined(*_: object) -> remote_worker.Ended:
        return remote_worker.Ended("joined")

    async def play() -> None:
        worker = remote_worker.RemoteWorker(settings.file)
        monkeypatch.setattr(worker, "_joined", joined)
        asked = asyncio.create_task(worker._session(port.access))
        await asyncio.sleep(5.0)
        assert [type(one) for one in happened] == [Joined]
        port.tell(0, SETUP)
        assert await asked == (True, remote_worker.Ended("joined"))

    try:
        asyncio.run(play())
    finally:
        port.close()
