"""The process that calls a reward function: `python -m trainer.reward_worker module:function MEMORY OPTIONS`. Started by
`trainer.rewards` only.

Frames come on standard input and go to standard output, by descriptors of this process's own: the function, and what it starts, read an
empty input, and what they print goes to standard error, so they cannot break a frame. Nor does a copy of this process that the function
forked and that returns from it: it ends there, because a second answer would be taken for that of the next call.
Any exception of the function is caught here, for one named recovery: its type is sent back, and apart from it what it said, which may
quote the prompt or the answer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from blake3 import blake3

from scavenger.errors import ConfigError
from trainer.reserved import die_with_parent
from trainer.rewards import Answer, Ask, framed, read_frame

Function = Callable[[str, str, dict[str, Any]], float]


def _write(out: BinaryIO, answer: Answer) -> None:
    out.write(framed(msgspec.msgpack.encode(answer)))
    out.flush()


def _version(name: str, more: str) -> str:
    """The function's name, a hash of the file of its module, as far as there is one, and one of `more`, if there is any."""
    path = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    named = f"{name}@{blake3(Path(path).read_bytes()).hexdigest()[:16]}" if path else name
    return f"{named}+{blake3(more.encode()).hexdigest()[:8]}" if more else named


def _load(name: str, given: str) -> tuple[Function, str, bool]:
    """The function, ready to be called, its version, and whether its deadline says that an answer is wrong (`verifiers.late_is_wrong`).

    `given`: its options, as JSON.
    """
    options = json.loads(given)
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is not callable")
    try:
        inspect.signature(function).bind("", "", {}, **options)  # an option that it does not have is told before the run starts
    except TypeError as error:
        remedy = "it is called with (prompt, answer, meta) and [reward.options] as keywords"
        raise ConfigError(f"it cannot be called: {error}", remedy) from error
    prepare = getattr(function, "prepare_rewards", None)
    follows = prepare(**options) if prepare else ""  # what only the first call does must not make it late
    version = _version(name, (given if options else "") + follows)
    return functools.partial(function, **options), version, getattr(function, "late_is_wrong", False) is True


def _score(function: Function, ask: Ask) -> Answer:
    try:
        reward = float(function(ask.prompt, ask.answer, json.loads(ask.meta)))
    except Exception as error:  # noqa: BLE001  a user's function may raise anything; the runner retries, then stops or masks
        return _failed(error)
    return Answer(reward=reward) if math.isfinite(reward) else Answer(error=f"the reward is {reward}")


def _failed(error: Exception) -> Answer:
    found = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    places = [(file, line) for file, line in found if file != __file__]
    where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    return Answer(error=f"it raised {type(error).__name__}", said=f"{error}{where}".encode(errors="backslashreplace").decode())


def _bound_memory(more: int) -> None:
    """At most `more` bytes beyond what this process has; 0 = no bound. Private writable memory: what a GPU's driver reserves is none."""
    if not more:
        return
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    bound = int(status.partition("VmData:")[2].split()[0]) * 1024 + more
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or bound < most:
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def main(argv: list[str]) -> int:
    die_with_parent()  # it leads a group of its own, so nobody else ends it while a call hangs
    frames, out, own_pid = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), os.getpid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        function, version, late_is_wrong = _load(argv[1], argv[3])
    except ConfigError as error:
        _write(out, Answer(error=error.cause, said=error.quoted, remedy=error.remedy))
        return 1
    except Exception as error:  # noqa: BLE001  importing a user's module may raise anything; the runner reports it
        _write(out, _failed(error))
        return 1
    _bound_memory(int(argv[2]))
    _write(out, Answer(reward=0.0, version=version, late_is_wrong=late_is_wrong))
    while (payload := read_frame(frames.read)) is not None:
        answer = _score(function, msgspec.msgpack.decode(payload, type=Ask))
        if os.getpid() != own_pid:
            os._exit(0)
        _write(out, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
