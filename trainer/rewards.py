"""Calls a reward function in a process of its own, with a deadline. A failure is never a reward of 0, save that a function can declare
its deadline to mean a wrong answer (`LateAnswer`).

Owns the process, its frames (length-prefixed MessagePack over pipes) and the retries; knows no ledger, model or step. The process leads
a session of its own: what a function started ends with it. What a run does with a `RewardError` (`on_reward_error`) is the loop's
decision. Its cause goes to the ledger and names the function and the type of what went wrong; what the function said, and the answer, are
quoted beside it for the trainer's own log. The function must depend on its arguments alone: results are recorded with the function's
version, and a resumed run takes those that were recorded under the same one.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import msgspec

from scavenger.errors import ConfigError, LateAnswer, RewardError

_LENGTH = struct.Struct("<I")
START_TIMEOUT_S = 120.0
MEMORY_GB = 4.0
ENDING_S = 5.0  # what a process that closed its pipes has to end by itself


def framed(payload: bytes) -> bytes:
    """A frame: the payload behind its length."""
    return _LENGTH.pack(len(payload)) + payload


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next frame's payload, None at the end of the stream. `read(n)` gives n bytes, fewer only at the end."""
    head = read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = read(length)
    return payload if len(payload) == length else None


class Ask(msgspec.Struct, frozen=True):
    prompt: str
    answer: str
    meta: str  # JSON in ASCII: MessagePack has no integers over 64 bits


class Answer(msgspec.Struct, frozen=True):
    """Either `reward` or `error` is set. `said`: an exception's words. `version`: the function's, in the first answer of a process.

    So are `late_is_wrong`: whether this function's deadline says that an answer is wrong, and `remedy`, of an error.
    """

    reward: float | None = None
    error: str | None = None
    said: str = ""
    remedy: str = ""
    version: str = ""
    late_is_wrong: bool = False


_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class RewardRunner:
    """`function` is "module:name", called as name(prompt_text, answer_text, meta, **options) -> float. Use as a context manager.

    Its further keyword arguments are `options`. `version` names what gives the rewards; unless the user named it, it is the function's
    name and a hash of its module's file, and one of the options. `memory_gb`: what a call may take beyond what the process has once the
    function is imported; 0 = no bound. `start_timeout_s`: what importing and preparing it may take.
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
    ) -> None:
        if function.count(":") != 1:
            raise ConfigError(f"reward.function = {function!r} is not a function's name", 'write "module:function"')
        self._function = function
        self._arguments = [function, str(int(memory_gb * 2**30)), json.dumps(dict(options or {}), sort_keys=True)]
        self._named = version
        self.version = version
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._retries = retries
        self._late_is_wrong = False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RewardRunner:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def score(self, prompt: str, answer: str, meta: dict[str, Any]) -> float:
        """The reward. Raises `RewardError` when the function failed or overran its deadline `retries + 1` times.

        It is a `LateAnswer` where all of these were deadlines, and the function says that such an answer is wrong.
        """
        failure, ask = RewardError("it was not called"), Ask(prompt, answer, json.dumps(meta))
        late = 0
        for _ in range(self._retries + 1):
            try:
                return self._call(ask)
            except RewardError as error:
                failure = error
                late += isinstance(error, LateAnswer)
        raise (LateAnswer if self._late_is_wrong and late > self._retries else RewardError)(
            f"reward function {self._function} failed {self._retries + 1} times: {failure.cause}",
            'fix the function, or set reward.on_reward_error = "mask" to leave such samples out',
            quoted=f"{failure.quoted} (answer: {answer[:80]!r})".strip(),
        )

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self) -> None:
        """Start the process and wait until the function is imported. Raises `ConfigError` when it cannot be."""
        for left in reversed(range(self._retries + 1)):
            argv = [sys.executable, "-m", "trainer.reward_worker", *self._arguments]
            self._process = process = subprocess.Popen(
                argv, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            try:
                ready = self._receive(self._start_timeout_s, time.monotonic() + self._start_timeout_s)
                break
            except LateAnswer as error:
                self.close()
                cause = f"reward.function = {self._function!r} was not ready within {self._start_timeout_s:g} s"
                raise ConfigError(cause, "raise reward.start_timeout_s, if it has so much to load") from error
            except RewardError as error:
                killed = (process.returncode or 0) < 0
                self.close()
                if not (killed and left):  # killed from outside says nothing about the function
                    raise ConfigError(f"reward.function = {self._function!r}: {error.cause}", quoted=error.quoted) from error
        if ready.error is not None:
            self.close()
            remedy = ready.remedy or "the trainer's Python must be able to import it"
            raise ConfigError(f"reward.function = {self._function!r}: {ready.error}", remedy, quoted=ready.said)
        self.version = self._named or ready.version
        self._late_is_wrong = ready.late_is_wrong

    def _call(self, ask: Ask) -> float:
        if self._process is None:
            self._start()
        try:
            deadline = time.monotonic() + self._timeout_s
            self._send(msgspec.msgpack.encode(ask), deadline)
            answer = self._receive(self._timeout_s, deadline)
        except RewardError:
            self.close()  # it may still be running: the next call gets a fresh process
            raise
        if answer.reward is None:
            raise RewardError(answer.error or "no reward and no error", quoted=answer.said)
        return answer.reward

    def _send(self, payload: bytes, deadline: float) -> None:
        """Write the frame as the process takes it: one that is stopped or stuck takes no more than a pipe holds."""
        assert self._process is not None
        assert self._process.stdin is not None
        pipe, left = self._process.stdin, memoryview(framed(payload))
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_WRITE)
            while left:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise LateAnswer(f"no reward within {self._timeout_s:g} s")
                try:
                    left = left[os.write(pipe.fileno(), left) :]
                except BrokenPipeError as error:
                    raise RewardError(f"the reward process ended with status {self._ended()}") from error

    def _receive(self, timeout_s: float, deadline: float) -> Answer:
        payload = read_frame(lambda count: self._read(count, deadline, timeout_s))
        if payload is None:
            raise RewardError(f"the reward process ended with status {self._ended()}")
        try:
            return _answers.decode(payload)
        except msgspec.MsgspecError as error:
            raise RewardError("the reward process answered with something else than an answer", quoted=str(error)) from error

    def _ended(self) -> int:
        """The status of a process that closed its end of a pipe. One that lives on without it is of no more use."""
        assert self._process is not None
        until, how = time.monotonic() + ENDING_S, os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self._process.pid, how) is None and time.monotonic() < until:
            time.sleep(0.01)  # between two looks: waiting without reaping has no timeout
        return _end(self._process)

    def _read(self, count: int, deadline: float, timeout_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        read = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while len(read) < count:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise LateAnswer(f"no reward within {timeout_s:g} s")
                piece = os.read(self._process.stdout.fileno(), count - len(read))
                if not piece:
                    return read
                read += piece
        return read


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill the process and what it started, which has its group; the status. Until it is waited for, the number can be nobody else's."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
