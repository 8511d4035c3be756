"""The watchdog: who is stuck, at what, and that it is told and ended; real ranks that are stopped."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.trainer.test_launch import running
from trainer.launch import environment
from trainer.loop.comm import Solo
from trainer.loop.ending import SIGTERM_EXIT
from trainer.loop.watchdog import STUCK_EXIT, Beat, Circle, Here, RankReport, RankWatch, judge, meet, waiting

ROOT = Path(__file__).resolve().parents[2]


def heard(
    rank: int, doing: str, age_s: float, count: int, *, idle: bool = False, silent_s: float = 0.0
) -> tuple[int, RankReport]:
    return rank, RankReport(
        Beat(rank, f"node{rank}", 100 + rank, doing, idle, age_s, count), 1000.0 - silent_s
    )


def test_ranks_that_wait_for_samples_are_never_stuck() -> None:
    ranks = dict([heard(0, "starting", 9e5, 7, idle=True), heard(1, "waiting for rank 0", 9e5, 7, idle=True)])
    assert judge(ranks, 1000.0, 60.0) == ()


def test_a_silent_rank_is_named_with_where_it_was_and_who_waits() -> None:
    ranks = dict(
        [
            heard(0, "waiting for answers to Train", 65.0, 8),
            heard(1, "Train", 2.0, 8, silent_s=61.0),
            heard(2, "Train", 66.0, 8),
        ]
    )
    findings = judge(ranks, 1000.0, 60.0)
    assert [finding.rank for finding in findings] == [1]
    assert (
        findings[0].text
        == "rank 1 (host node1, pid 101) gives no sign of life for 61.0 s: it was at 'Train' then, for 2.0 s"
    )
    assert waiting(ranks, findings, 1000.0) == [
        "rank 0 (host node0, pid 100) is at 'waiting for answers to Train' for 65.0 s",
        "rank 2 (host node2, pid 102) is at 'Train' for 66.0 s",
    ]


def test_a_living_rank_that_has_not_begun_what_the_others_are_at_is_the_one() -> None:
    ranks = dict([heard(0, "Update", 70.0, 9), heard(1, "Update", 70.0, 9), heard(2, "Train", 71.0, 8)])
    assert [finding.rank for finding in judge(ranks, 1000.0, 60.0)] == [2]
    assert judge(ranks, 1000.0, 80.0) == ()


def test_if_all_are_in_one_command_all_are_named() -> None:
    ranks = dict([heard(0, "Update", 70.0, 9), heard(1, "Update", 70.0, 9)])
    assert [finding.rank for finding in judge(ranks, 1000.0, 60.0)] == [0, 1]


class Neighbour:
    """Rank 1 of two, without a process: answers `meet`."""

    rank, size = 0, 2

    def __init__(self, port: int) -> None:
        import socket

        import msgspec

        self._frame = msgspec.msgpack.encode((socket.gethostname(), port))

    def replies(self) -> list[bytes]:
        return [self._frame]

    def share(self, frame: bytes) -> bytes:
        return frame


def test_a_hung_main_thread_is_told_again_after_twice_the_time_and_so_is_that_it_goes_on() -> None:
    said: queue.Queue[str] = queue.Queue()
    here, ends = Here(), []
    watch = RankWatch(
        meet(Solo()), here, stuck_s=0.1, end_s=0.5, say=said.put, end=lambda: ends.append(1), beat_s=0.02
    )
    watch.start()
    with here.at("Train of 3 samples", command=True):
        first, second = said.get(timeout=10), said.get(timeout=10)
        assert "watchdog: stuck: rank 0" in first
        assert "is at 'Train of 3 samples' for 0.1" in first
        assert "watchdog: stuck: rank 0" in second
        while "the job ends with status 75" not in said.get(timeout=10):
            pass
    while said.get(timeout=10) != "watchdog: all ranks go on":
        pass
    watch.stop()
    assert ends


def test_a_datagram_of_a_stranger_is_no_sign_of_life() -> None:
    import socket

    import msgspec

    said: queue.Queue[str] = queue.Queue()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        neighbour = Neighbour(other.getsockname()[1])
        circle: Circle = meet(neighbour)  # type: ignore[arg-type]
        watch = RankWatch(circle, Here(), stuck_s=0.4, end_s=60.0, say=said.put, beat_s=0.02)
        watch.start()
        beat = msgspec.msgpack.decode(other.recv(4096), type=Beat)
        own = ("127.0.0.1", circle.socket.getsockname()[1])
        other.sendto(msgspec.msgpack.encode(msgspec.structs.replace(beat, rank=1, doing="Train")), own)
        stop = time.monotonic() + 90
        while said.empty() and time.monotonic() < stop:
            other.sendto(b"\xc1", own)
            other.sendto(msgspec.msgpack.encode(msgspec.structs.replace(beat, rank=1, token=b"another")), own)
            time.sleep(0.02)  # a stranger's own pace
        watch.stop()
    assert "rank 1" in said.get(timeout=1)


@contextmanager
def job(out: Path) -> Iterator[subprocess.Popen[str]]:
    environ = environment(os.environ, root=os.geteuid() == 0) | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    program = [sys.executable, str(Path(__file__).with_name("watch_program.py")), str(out)]
    process = subprocess.Popen(
        ["mpirun", "-n", "2", *program],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stop = time.monotonic() + 120
        while not all((out / name).exists() for name in ("rank-0", "rank-1", "listening")):
            assert process.poll() is None, process.communicate()[1][-2000:]
            assert time.monotonic() < stop
            time.sleep(0.02)  # between two looks
        yield process
    finally:
        for mark in out.glob("rank-?"):
            try:
                os.kill(int(mark.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.kill()
        process.communicate()


@pytest.mark.mpi
def test_a_stopped_rank_is_named_with_who_waits_for_it_and_the_job_ends_to_be_resumed(tmp_path: Path) -> None:
    with job(tmp_path) as process:
        pid = int((tmp_path / "rank-1").read_text())
        os.kill(pid, signal.SIGSTOP)
        _, said = process.communicate(timeout=100)
        assert process.returncode == STUCK_EXIT, said[-2000:]
        line = next(line for line in said.splitlines() if "watchdog: stuck:" in line)
        assert f"pid {pid}) gives no sign of life" in line
        assert line.index("rank 1") < line.index("Meanwhile: rank 0")
        assert "is at 'waiting for answers to Train'" in line
        stop = time.monotonic() + 90
        while running(pid):  # mpirun ends it, stopped as it is
            assert time.monotonic() < stop
            time.sleep(0.02)  # between two looks


@pytest.mark.mpi
def test_a_stopped_rank_0_is_named_by_rank_1(tmp_path: Path) -> None:
    with job(tmp_path) as process:
        pid = int((tmp_path / "rank-0").read_text())
        os.kill(pid, signal.SIGSTOP)
        _, said = process.communicate(timeout=100)
        assert process.returncode == STUCK_EXIT, said[-2000:]
        assert f"pid {pid}) gives no sign of life" in said


@pytest.mark.mpi
def test_mpirun_passes_on_that_the_job_shall_end_and_lets_it(tmp_path: Path) -> None:
    with job(tmp_path) as process:
        process.send_signal(signal.SIGUSR1)
        told, said = process.communicate(timeout=100)
        assert (process.returncode, "told by SIGUSR1" in told) == (SIGTERM_EXIT, True), said[-2000:]
