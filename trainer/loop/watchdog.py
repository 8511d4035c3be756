"""The step watchdog: which rank is stuck, at what, since when, and who waits for it.

Owns what a rank says of itself (`Here`), how ranks tell one another (`RankWatch`: a datagram a second from a thread, so a rank whose main
thread hangs still says where, and one that is stopped or gone says nothing), and the judgement (`judge`, pure). Rank 0 looks at all ranks,
rank 1 at rank 0. Knows no command's meaning: every rank runs the same commands in the same order, so a rank that has begun fewer is behind.

A rank may wait for ever for rank 0, and rank 0 for samples: with no engine anywhere that is a normal state. A command may not.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from trainer.loop.comm import Comm

BEAT_S = 1.0
#: Exit status of a job that its watchdog ended: it may be started again at once (EX_TEMPFAIL).
STUCK_EXIT = 75
MAX_BEAT_BYTES = 2048


class Beat(msgspec.Struct, frozen=True):
    """A rank's word: what it has been doing for `age_s`. `idle`: that may take for ever. `count`: commands it has begun."""

    rank: int
    host: str
    pid: int
    doing: str
    idle: bool
    age_s: float
    count: int
    token: bytes = b""


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's last word, and when it came (monotonic seconds of who heard it)."""

    beat: Beat
    at: float


@dataclass(frozen=True, slots=True)
class StuckRank:
    """One stuck rank. `since_s`: for how long."""

    rank: int
    since_s: float
    text: str


def judge(
    heard: Mapping[int, RankReport], now: float, stuck_s: float, *, silence: bool = False
) -> tuple[StuckRank, ...]:
    """The ranks that hold the others up. Those that wait for them are not among them; if all are in one command, all are.

    `silence`: only those that give no sign of life.
    """
    silent = [one for _, one in sorted(heard.items()) if now - one.at > stuck_s]
    if silent or silence:
        return tuple(
            StuckRank(one.beat.rank, now - one.at, _silent(one.beat, now - one.at)) for one in silent
        )
    late = [one for _, one in sorted(heard.items()) if not one.beat.idle and _age(one, now) > stuck_s]
    if not late:
        return ()
    least = min(one.beat.count for one in heard.values())
    behind = [one for _, one in sorted(heard.items()) if one.beat.count == least]
    return tuple(StuckRank(one.beat.rank, _age(one, now), _working(one, now)) for one in behind)


def waiting(heard: Mapping[int, RankReport], findings: tuple[StuckRank, ...], now: float) -> list[str]:
    """What all other ranks are at meanwhile."""
    stuck = {finding.rank for finding in findings}
    return [_working(one, now) for rank, one in sorted(heard.items()) if rank not in stuck]


def _age(one: RankReport, now: float) -> float:
    return one.beat.age_s + max(0.0, now - one.at)


def _name(beat: Beat) -> str:
    return f"rank {beat.rank} (host {beat.host}, pid {beat.pid})"


def _silent(beat: Beat, since_s: float) -> str:
    return f"{_name(beat)} gives no sign of life for {since_s:.1f} s: it was at {beat.doing!r} then, for {beat.age_s:.1f} s"


def _working(one: RankReport, now: float) -> str:
    return f"{_name(one.beat)} is at {one.beat.doing!r} for {_age(one, now):.1f} s"


class Here:
    """What this process is doing. Written by its main thread, read by its watch."""

    def __init__(self) -> None:
        self._state: tuple[str, bool, float, int] = ("starting", True, time.monotonic(), 0)

    @contextmanager
    def at(self, doing: str, *, idle: bool = False, command: bool = False) -> Iterator[None]:
        before = self._state
        self._state = (doing, idle, time.monotonic(), before[3] + command)
        try:
            yield
        finally:
            self._state = (before[0], before[1], time.monotonic(), before[3] + command)

    def read(self) -> tuple[str, bool, float, int]:
        """What, whether it may take for ever, for how long, and commands begun."""
        doing, idle, since, count = self._state
        return doing, idle, time.monotonic() - since, count


@dataclass(frozen=True, slots=True)
class Circle:
    """Where ranks hear one another; `token` keeps others' datagrams out."""

    rank: int
    socket: socket.socket
    addresses: tuple[tuple[str, int], ...]
    token: bytes


def meet(comm: Comm) -> Circle:
    """All ranks: a socket each on a port of the system's, and all addresses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind(("", 0))
    mine = (socket.gethostname(), listener.getsockname()[1])
    if comm.rank:
        comm.reply(msgspec.msgpack.encode(mine))
        addresses, token = msgspec.msgpack.decode(
            comm.share(b""), type=tuple[tuple[tuple[str, int], ...], bytes]
        )
    else:
        all_of = [mine, *(msgspec.msgpack.decode(frame, type=tuple[str, int]) for frame in comm.replies())]
        together = len({host for host, _ in all_of}) == 1
        addresses = tuple(("127.0.0.1" if together else host, port) for host, port in all_of)
        token = secrets.token_bytes(16)
        comm.share(msgspec.msgpack.encode((addresses, token)))
    return Circle(comm.rank, listener, addresses, token)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end() -> None:
    os._exit(STUCK_EXIT)  # the main thread hangs, so nothing can be closed; the launcher ends the other ranks


class RankWatch:
    """This rank's thread. `end` is called when a rank was stuck for `end_s`, in the rank that found it."""

    def __init__(
        self,
        circle: Circle,
        here: Here,
        *,
        stuck_s: float,
        end_s: float,
        say: Callable[[str], None] = _say,
        end: Callable[[], None] = _end,
        beat_s: float = BEAT_S,
    ) -> None:
        self._circle, self._here = circle, here
        self._stuck_s, self._end_s, self._beat_s = stuck_s, end_s, min(beat_s, stuck_s / 4)
        self._say, self._end = say, end
        self._heard: dict[int, RankReport] = {}
        self._reported_s: float = 0.0  # for how long the longest stuck was when it was last told
        self._unreachable = False
        self._stop = threading.Event()
        self._pid, self._host = os.getpid(), socket.gethostname()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._circle.socket.close()

    def _run(self) -> None:
        polled_at = time.monotonic()
        while not self._stop.is_set():
            self._beat()
            self._listen(time.monotonic() + self._beat_s)
            now = time.monotonic()
            if (
                gap := now - polled_at - self._beat_s
            ) > self._stuck_s / 2:  # this process was stopped itself: that is no silence of others
                self._heard = {rank: RankReport(one.beat, one.at + gap) for rank, one in self._heard.items()}
            elif self._circle.rank <= 1:
                self._check(now)
            polled_at = now

    def _beat(self) -> None:
        circle = self._circle
        doing, idle, age_s, count = self._here.read()
        beat = Beat(circle.rank, self._host, self._pid, doing, idle, age_s, count, circle.token)
        if circle.rank == 0:
            self._heard[0] = RankReport(beat, time.monotonic())
        to = 1 if circle.rank == 0 else 0
        if to < len(circle.addresses):
            try:
                circle.socket.sendto(msgspec.msgpack.encode(beat), circle.addresses[to])
            except OSError as error:  # a beat may be lost; the other end notices when all are
                if not self._unreachable:
                    self._say(f"watchdog: rank {circle.rank} cannot reach {circle.addresses[to][0]}: {error}")
                self._unreachable = True

    def _listen(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0 and not self._stop.is_set():
            if not select.select([self._circle.socket], [], [], left)[0]:
                return
            data = self._circle.socket.recv(MAX_BEAT_BYTES)
            try:
                beat = msgspec.msgpack.decode(data, type=Beat)
            except msgspec.MsgspecError:
                continue  # not a beat of ours
            if secrets.compare_digest(beat.token, self._circle.token) and beat.rank != self._circle.rank:
                self._heard[beat.rank] = RankReport(beat, time.monotonic())

    def _check(self, now: float) -> None:
        """Rank 0 judges all, rank 1 whether rank 0 lives: it hears of no other rank."""
        findings = judge(self._heard, now, self._stuck_s, silence=self._circle.rank == 1)
        longest = max((finding.since_s for finding in findings), default=0.0)
        if not findings:
            if self._reported_s:
                self._say("watchdog: all ranks go on")
            self._reported_s = 0.0
            return
        if longest >= 2 * self._reported_s:
            self._reported_s = longest
            stuck = "; ".join(finding.text for finding in findings)
            meanwhile = "; ".join(waiting(self._heard, findings, now))
            self._say(f"watchdog: stuck: {stuck}" + (f". Meanwhile: {meanwhile}" if meanwhile else ""))
        if longest >= self._end_s:
            self._say(
                f"watchdog: the job ends with status {STUCK_EXIT} after {longest:.0f} s; the run can be resumed"
            )
            self._end()
