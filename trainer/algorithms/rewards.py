"""Calls a reward function in a process of its own, with a deadline. A failure is never a reward of 0, save that a function can declare
its deadline to mean a wrong completion (`RewardTimeout`).

Owns the process, its frames (length-prefixed MessagePack over pipes) and the retries; knows no ledger, model or step. The process leads
a session of its own and carries a mark: what a function started ends with it. One that ran out of memory or descriptors is replaced.
What a run does with a `RewardError` (`on_reward_error`) is the loop's decision. Its cause goes to the ledger and names the function and
the type of what went wrong; what the function said, and the completion, are quoted beside it for the trainer's own log. The function must
depend on its arguments alone: results are recorded with the function's version, and a resumed run takes those that were recorded under
the same one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from scavenger.errors import ConfigError, RewardError, RewardTimeout

LENGTH = struct.Struct("<I")
START_TIMEOUT_S = 120.0
MEMORY_GB = 4.0
#: The environment variable by which what a function started is found, wherever it went.
MARK = "SCAVENGER_REWARD_PROCESS"
GRACE_S = 5.0  # beyond a concurrent call's deadline, which the process keeps itself: then it is blocked
ENDING_S = 5.0  # what a process that closed its pipes has to end by itself


def framed(payload: bytes) -> bytes:
    """A frame: the payload behind its length."""
    return LENGTH.pack(len(payload)) + payload


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next frame's payload, None at the end of the stream. `read(n)` gives n bytes, fewer only at the end."""
    head = read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    payload = read(length)
    return payload if len(payload) == length else None


class RewardRequest(msgspec.Struct, frozen=True):
    """Completions of one prompt: one, or a group's for a function that rewards groups. `number` comes back with the reply."""

    prompt: str
    completions: tuple[str, ...]
    meta: str  # JSON in ASCII: MessagePack has no integers over 64 bits
    number: int = 0


#: A completion's parts by name; of a function that returns a number, that number under "".
Parts = dict[str, float]


class RewardReply(msgspec.Struct, frozen=True):
    """Either `scores`, one for each completion, or `error` is set. `output`: an exception's words. `late`: the error is the deadline's.

    In the first reply of a process: `version`, the function's; `late_is_wrong`: whether its deadline says that a completion is wrong;
    `concurrent`: it is `async def`; `whole_group`: it is called with a group's completions. `remedy`, of an error. `exhausted`: the
    process has no memory, or no file descriptors, for this call.
    """

    scores: tuple[Parts, ...] | None = None
    error: str | None = None
    output: str = ""
    remedy: str = ""
    version: str = ""
    late_is_wrong: bool = False
    exhausted: bool = False
    late: bool = False
    concurrent: bool = False
    whole_group: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class Reward:
    """A completion's reward, the parts that it was made of (none of a plain number), and the last deadline that counts as a 0 in it."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    late: RewardTimeout | None = None


class RewardProcessLost(RewardError):
    """The process ended under a call, for whatever of the calls that it had under way."""


_replies: msgspec.msgpack.Decoder[RewardReply] = msgspec.msgpack.Decoder(RewardReply)


class RewardRunner:
    """`function` is "module:name", called as name(prompt, completion, meta, **options) -> float. Use as a context manager.

    Its further keyword arguments are `options`. `version` names what gives the rewards; unless the user named it, it is the function's
    name and a hash of its module's file, and one of the options. `memory_gb`: what a call may take beyond what the process has once the
    function is imported; 0 = no bound. `start_timeout_s`: what importing and preparing it may take. `folder`: where its module is looked
    for before the places that Python knows.
    """

    def __init__(
        self,
        function: str,
        *,
        timeout_s: float,
        retries: int,
        version: str = "",
        options: Mapping[str, Any] | None = None,
        memory_gb: float = MEMORY_GB,
        start_timeout_s: float = START_TIMEOUT_S,
        folder: Path | None = None,
    ) -> None:
        if function.count(":") != 1:
            raise ConfigError(
                f"reward.function = {function!r} is not a function's name", 'write "module:function"'
            )
        self._function = function
        self._arguments = [
            function,
            str(int(memory_gb * 2**30)),
            json.dumps(dict(options or {}), sort_keys=True),
            str(timeout_s),
            str(folder or ""),
        ]
        self._folder = folder
        self._named = version
        self.version = version
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._retries = retries
        self._late_is_wrong = False
        self._process: subprocess.Popen[bytes] | None = None
        self._calls = 0  # that this process was given
        self._mark = ""
        self.concurrent = self.whole_group = False  # known once it was started
        self._numbers = itertools.count()
        self._under_way: dict[int, Future[RewardReply]] = {}
        self._reader: threading.Thread | None = None
        self._writing, self._one_at_a_time = threading.Lock(), threading.Lock()
        self._ending = threading.Lock()
        self._stopped = False

    def __enter__(self) -> RewardRunner:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        """The reward of one completion: its parts' sum. See `call`."""
        return math.fsum(self.call(prompt, (completion,), meta)[0].values())

    def call(self, prompt: str, completions: Sequence[str], meta: dict[str, Any]) -> tuple[Parts, ...]:
        """What the function gives. Raises `RewardError` when it failed or overran its deadline `retries + 1` times.

        It is a `RewardTimeout` where all of these were deadlines, and the function says that such a completion is wrong. Of calls that were
        under way side by side when their process ended it is not known which caused it: they are made again, one at a time, and
        only then counted.
        """
        failure, ask = (
            RewardError("it was not called"),
            RewardRequest(prompt, tuple(completions), json.dumps(meta)),
        )
        late = tries = 0
        lost = False
        while tries <= self._retries and not self._stopped:
            try:
                with self._one_at_a_time if lost else contextlib.nullcontext():
                    return self._call_beside(ask, alone=lost) if self.concurrent else self._call(ask)
            except RewardError as error:
                failure = error
                late += isinstance(error, RewardTimeout)
                tries += lost or not isinstance(error, RewardProcessLost)
                lost = lost or isinstance(error, RewardProcessLost)
        raise (RewardTimeout if self._late_is_wrong and late > self._retries else RewardError)(
            f"reward function {self._function} failed {tries} times: {failure.cause}",
            'fix the function, or set reward.on_reward_error = "mask" to leave such samples out',
            quoted=f"{failure.quoted} (completion: {completions[0][:80]!r})".strip(),
        )

    def stop(self) -> None:
        """From any thread: kill the process and start none again. The call under way fails; `close` is still to be called after it."""
        with self._ending:
            self._stopped = True
            if self._process is not None:
                _end(self._process, self._mark)

    def close(self) -> None:
        with self._ending:
            process, self._process = self._process, None
            if process is not None:
                _end(process, self._mark)
        if process is not None:
            if self._reader is not None and self._reader is not threading.current_thread():
                self._reader.join(
                    ENDING_S
                )  # it reads until the end, which has come; then the pipe's number can be another's
            self._reader = None
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self) -> None:
        """Start the process and wait until the function is imported. Raises `ConfigError` when it cannot be."""
        for left in reversed(range(self._retries + 1)):
            argv = [sys.executable, "-m", "trainer.algorithms.reward_worker", *self._arguments]
            with self._ending:
                if self._stopped:
                    raise RewardError("the trainer ended first")
                self._calls, self._mark = 0, f"{MARK}={secrets.token_hex(16)}"
                environ = os.environ | dict([self._mark.split("=")])
                try:
                    self._process = process = subprocess.Popen(
                        argv,
                        bufsize=0,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        start_new_session=True,
                        env=environ,
                    )
                except OSError as error:  # no process, memory or descriptor is left at this moment
                    raise RewardError(
                        f"its process cannot be started: {error.strerror}",
                        "see the limits of the training job's user",
                    ) from error
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            try:
                ready = self._receive(self._start_timeout_s, time.monotonic() + self._start_timeout_s)
                break
            except RewardTimeout as error:
                self.close()
                cause = (
                    f"reward.function = {self._function!r} was not ready within {self._start_timeout_s:g} s"
                )
                raise ConfigError(cause, "raise reward.start_timeout_s, if it has so much to load") from error
            except RewardError as error:
                killed = (process.returncode or 0) < 0
                self.close()
                if not (killed and left):  # killed from outside says nothing about the function
                    raise ConfigError(
                        f"reward.function = {self._function!r}: {error.cause}", quoted=error.quoted
                    ) from error
        if ready.error is not None:
            self.close()
            remedy = ready.remedy or (
                f"put its module into {self._folder}, or where the trainer's Python finds it"
                if self._folder
                else "the trainer's Python must be able to import it"
            )
            raise ConfigError(
                f"reward.function = {self._function!r}: {ready.error}", remedy, quoted=ready.output
            )
        self.version = self._named or ready.version
        self._late_is_wrong, self.concurrent, self.whole_group = (
            ready.late_is_wrong,
            ready.concurrent,
            ready.whole_group,
        )
        if self.concurrent:
            self._under_way = {}
            self._reader = threading.Thread(
                target=self._read_replies, args=(process, self._under_way), name="reward-reader", daemon=True
            )
            self._reader.start()

    def _call(self, ask: RewardRequest) -> tuple[Parts, ...]:
        if self._process is None:
            self._start()
        try:
            deadline = time.monotonic() + self._timeout_s
            self._send(msgspec.msgpack.encode(ask), deadline)
            reply = self._receive(self._timeout_s, deadline)
        except RewardError:
            self.close()  # it may still be running: the next call gets a fresh process
            raise
        if reply.exhausted:
            self.close()
            if self._calls:  # what earlier calls left behind took it: no fault of this one's
                return self._call(ask)
        self._calls += 1
        return _scores(reply)

    def _call_beside(self, ask: RewardRequest, *, alone: bool, again: bool = True) -> tuple[Parts, ...]:
        """A call of any thread, beside others in the one process. `alone`: it is one of those that are made one at a time. `again`: it is
        made again where its process had ended before it could be sent: this call did not end it."""
        deadline, result = time.monotonic() + self._timeout_s + GRACE_S, Future[RewardReply]()
        with self._writing:
            if self._reader is not None and not self._reader.is_alive():
                self.close()
            if self._process is None:
                self._start()
            process, under_way, number = self._process, self._under_way, next(self._numbers)
            under_way[number] = result
            try:
                self._send(msgspec.msgpack.encode(msgspec.structs.replace(ask, number=number)), deadline)
            except RewardError as error:
                self.close()
                if isinstance(error, RewardTimeout):
                    raise
                if not again:
                    raise RewardProcessLost(error.cause) from error
                sent = False
            else:
                sent = True
        if not sent:
            return self._call_beside(ask, alone=alone, again=False)
        try:
            reply = result.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:  # it should have said so itself: the process is blocked, and every call in it
            self._replace(process)
            raise (RewardTimeout if alone else RewardProcessLost)(
                f"no reward within {self._timeout_s:g} s"
            ) from None
        if reply.exhausted:
            self._replace(process)
            raise RewardProcessLost(reply.error or "", quoted=reply.output)
        return _scores(reply)

    def _replace(self, process: subprocess.Popen[bytes] | None) -> None:
        with self._writing:
            if self._process is process:
                self.close()

    def _read_replies(
        self, process: subprocess.Popen[bytes], under_way: dict[int, Future[RewardReply]]
    ) -> None:
        """A thread's life: give each reply to the call that waits for it. At the process's end they all are told."""
        assert process.stdout is not None
        pipe, why, output = process.stdout, "the reward process ended", ""
        try:
            while (payload := read_frame(lambda count: _read_whole(pipe.fileno(), count))) is not None:
                reply = _replies.decode(payload)
                if (result := under_way.pop(reply.number, None)) is not None:
                    result.set_result(reply)
        except msgspec.MsgspecError as error:
            why, output = "the reward process answered with something that is no reply", str(error)
        for result in list(under_way.values()):
            with contextlib.suppress(InvalidStateError):
                result.set_exception(RewardProcessLost(why, quoted=output))

    def _send(self, payload: bytes, deadline: float) -> None:
        """Write the frame as the process takes it: one that is stopped or stuck takes no more than a pipe holds."""
        assert self._process is not None
        assert self._process.stdin is not None
        pipe, left = self._process.stdin, memoryview(framed(payload))
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_WRITE)
            while left:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise RewardTimeout(f"no reward within {self._timeout_s:g} s")
                try:
                    left = left[os.write(pipe.fileno(), left) :]
                except BrokenPipeError as error:
                    raise RewardError(f"the reward process ended with status {self._ended()}") from error

    def _receive(self, timeout_s: float, deadline: float) -> RewardReply:
        payload = read_frame(lambda count: self._read(count, deadline, timeout_s))
        if payload is None:
            raise RewardError(f"the reward process ended with status {self._ended()}")
        try:
            return _replies.decode(payload)
        except msgspec.MsgspecError as error:
            raise RewardError(
                "the reward process answered with something that is no reply", quoted=str(error)
            ) from error

    def _ended(self) -> int:
        """The status of a process that closed its end of a pipe. One that lives on without it is of no more use."""
        assert self._process is not None
        until, how = time.monotonic() + ENDING_S, os.WEXITED | os.WNOWAIT | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # `stop` waited for it meanwhile
            while os.waitid(os.P_PID, self._process.pid, how) is None and time.monotonic() < until:
                time.sleep(0.01)  # between two looks: waiting without reaping has no timeout
        with self._ending:
            return _end(self._process, self._mark)

    def _read(self, count: int, deadline: float, timeout_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        read = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while len(read) < count:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise RewardTimeout(f"no reward within {timeout_s:g} s")
                piece = os.read(self._process.stdout.fileno(), count - len(read))
                if not piece:
                    return read
                read += piece
        return read


def _scores(reply: RewardReply) -> tuple[Parts, ...]:
    if reply.scores is None:
        raise (RewardTimeout if reply.late else RewardError)(
            reply.error or "no reward and no error", quoted=reply.output
        )
    return reply.scores


def _read_whole(descriptor: int, count: int) -> bytes:
    """`count` bytes, fewer at the end."""
    read = b""
    while len(read) < count and (piece := os.read(descriptor, count - len(read))):
        read += piece
    return read


def _end(process: subprocess.Popen[bytes], mark: str) -> int:
    """Kill the process and what it started; the status. Until it is waited for, no other process can have the number.

    What it started has its group, or, if it began a session of its own, still its mark in the environment.
    """
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        # The kernel ends it when the device answers that it waits for, such as a folder that hangs: nobody waits for that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        until = time.monotonic() + ENDING_S
        while (
            left := _marked(mark)
        ) and time.monotonic() < until:  # one may have forked while it was looked for
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.01)  # between two looks: they are not our children, so they cannot be waited for
    return -signal.SIGKILL if process.returncode is None else int(process.returncode)


def _marked(mark: str) -> list[int]:
    """Processes, zombies aside, that were started with the mark in their environment."""
    wanted, found = mark.encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found
