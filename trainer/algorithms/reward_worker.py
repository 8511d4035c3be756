"""The process that calls a reward function: `python -m trainer.algorithms.reward_worker module:function MEMORY OPTIONS
TIMEOUT FOLDER`. Started by `trainer.algorithms.rewards` only.

Frames come on standard input and go to standard output, by descriptors of this process's own: the function, and what it starts, read an
empty input, and what they print goes to standard error, so they cannot break a frame. Nor does a copy of this process that the function
forked and that returns from it: it ends there, because a second reply would be taken for that of the next call.
Any exception of the function is caught here, for one named recovery: its type is sent back, and apart from it what it said, which may
quote the prompt or the completion.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import json
import math
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from blake3 import blake3

from scavenger.errors import ConfigError
from trainer.algorithms.rewards import LENGTH, RewardReply, RewardRequest, framed, read_frame
from trainer.reserved import die_with_parent

#: What is left behind by earlier calls of a function that leaks may be why this one fails.
EXHAUSTED = (errno.EMFILE, errno.ENOMEM, errno.EAGAIN)
#: Names of parts, and how many: they become names of metrics.
PART, MOST_PARTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}", re.ASCII), 32
Function = Callable[[str, Any, dict[str, Any]], Any]


def _write(out: BinaryIO, reply: RewardReply) -> None:
    out.write(framed(msgspec.msgpack.encode(reply)))
    out.flush()


def _version(name: str, more: str) -> str:
    """The function's name, a hash of the file of its module, as far as there is one, and one of `more`, if there is any."""
    path = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    named = f"{name}@{blake3(Path(path).read_bytes()).hexdigest()[:16]}" if path else name
    return f"{named}+{blake3(more.encode()).hexdigest()[:8]}" if more else named


def _look_in(folder: Path, module: str) -> None:
    """Have modules found in `folder`: before all others where it has `module`, so that its neighbours are found too; else after them."""
    path = folder.joinpath(*module.split("."))
    has = path.with_name(f"{path.name}.py").is_file() or (path / "__init__.py").is_file()
    sys.path.insert(0 if has else len(sys.path), str(folder))


def _load(name: str, given: str, folder: str) -> tuple[Function, RewardReply]:
    """The function, ready to be called, and what the trainer is told of it. `given`: its options, as JSON."""
    options = json.loads(given)
    module, _, attribute = name.partition(":")
    if folder:
        _look_in(Path(folder).resolve(), module)
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is not callable")
    try:
        inspect.signature(function).bind(
            "", "", {}, **options
        )  # an option that it does not have is told before the run starts
    except TypeError as error:
        remedy = "it is called with (prompt, completion, meta) and [reward.options] as keywords"
        raise ConfigError(f"it cannot be called: {error}", remedy) from error
    prepare = getattr(function, "prepare_rewards", None)
    follows = prepare(**options) if prepare else ""  # what only the first call does must not make it late
    version = _version(name, (given if options else "") + follows)
    return functools.partial(function, **options), RewardReply(
        scores=(),
        version=version,
        late_is_wrong=getattr(function, "late_is_wrong", False) is True,
        whole_group=getattr(function, "whole_group", False) is True,
        concurrent=inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(type(function).__call__),
    )


def _arguments(ask: RewardRequest, whole_group: bool) -> tuple[str, Any, dict[str, Any]]:
    return ask.prompt, list(ask.completions) if whole_group else ask.completions[0], json.loads(ask.meta)


def _score(function: Function, ask: RewardRequest, whole_group: bool) -> RewardReply:
    try:
        return _scored(function(*_arguments(ask, whole_group)), ask, whole_group)
    except Exception as error:  # noqa: BLE001  a user's function may raise anything; the runner retries, then stops or masks
        return _failed(error)


def _scored(given: Any, ask: RewardRequest, whole_group: bool) -> RewardReply:
    """What a function returned, as a reply. Raises what its conversion raises."""
    rewards = list(given) if whole_group else [given]
    if len(rewards) != len(ask.completions):
        return RewardReply(error=f"it gave {len(rewards)} rewards for {len(ask.completions)} completions")
    scores = tuple(
        {key: float(value) for key, value in reward.items()}
        if isinstance(reward, dict)
        else {"": float(reward)}
        for reward in rewards
    )
    for reward, parts in zip(rewards, scores, strict=True):
        if isinstance(reward, dict) and not (
            0 < len(parts) <= MOST_PARTS and all(type(k) is str and PART.fullmatch(k) for k in parts)
        ):
            return RewardReply(
                error=f"it gave a dict that is not 1 to {MOST_PARTS} parts, each named by letters, digits and _"
            )
        if strange := [value for value in parts.values() if not math.isfinite(value)]:
            return RewardReply(error=f"the reward is {strange[0]}")
    return RewardReply(scores=scores)


async def _serve(
    function: Function, frames: BinaryIO, out: BinaryIO, timeout_s: float, whole_group: bool
) -> None:
    """Calls of an `async def` side by side; how many is the trainer's matter."""
    import asyncio  # a plain function's process starts without

    async def call(ask: RewardRequest) -> None:
        own_pid = os.getpid()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                reply = _scored(await function(*_arguments(ask, whole_group)), ask, whole_group)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  as in `_score`; nobody cancels but the function itself
            reply = _failed(error)
            if limit.expired():
                reply = RewardReply(error=f"no reward within {timeout_s:g} s", late=True)
        if os.getpid() != own_pid:
            os._exit(0)
        _write(out, msgspec.structs.replace(reply, number=ask.number))

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), frames)
    calls = set()
    while True:
        try:
            length = int.from_bytes(await reader.readexactly(LENGTH.size), "little")
            payload = await reader.readexactly(length)
        except asyncio.IncompleteReadError:
            return
        calls.add(task := asyncio.create_task(call(msgspec.msgpack.decode(payload, type=RewardRequest))))
        task.add_done_callback(calls.discard)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  the class is the function's, too
        return ""


def _failed(error: BaseException) -> RewardReply:
    found = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    traceback_lines = [(file, line) for file, line in found if file != __file__]
    where = f" ({traceback_lines[-1][0]}, line {traceback_lines[-1][1]})" if traceback_lines else ""
    output = f"{_words(error)}{where}".encode(errors="backslashreplace").decode()
    exhausted = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in EXHAUSTED)
    return RewardReply(error=f"it raised {type(error).__name__}", output=output, exhausted=exhausted)


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
    die_with_parent()  # it leads a group of its own, so no other process ends it while a call hangs
    frames, out, own_pid = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), os.getpid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        function, ready = _load(argv[1], argv[3], argv[5])
    except ConfigError as error:
        _write(out, RewardReply(error=error.cause, output=error.quoted, remedy=error.remedy))
        return 1
    except Exception as error:  # noqa: BLE001  importing a user's module may raise anything; the runner reports it
        _write(out, _failed(error))
        return 1
    _bound_memory(int(argv[2]))
    _write(out, ready)
    if ready.concurrent:
        import asyncio

        asyncio.run(_serve(function, frames, out, float(argv[4]), ready.whole_group))
        return 0
    while (payload := read_frame(frames.read)) is not None:
        reply = _score(function, msgspec.msgpack.decode(payload, type=RewardRequest), ready.whole_group)
        if os.getpid() != own_pid:
            os._exit(0)
        _write(out, reply)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
