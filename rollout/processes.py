"""Which processes below this one hold a GPU, and when they are gone: a process that is killed gives its memory back a moment later.

Owns what it takes of /proc. Ends nothing.

Boundary: the kernel's table of processes; IO.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

#: How the paths of GPUs begin, which a process has open that computes on one.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


def below(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    children = defaultdict[int, list[int]](list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # The name, in brackets, may hold anything; state and parent stand behind it.
                words = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children[int(words[1])].append(int(folder.name))
    found, todo = list[int](), [pid]
    while todo:
        todo += (next_ones := children[todo.pop()])
        found += next_ones
    return sorted(found)


def with_gpus(pids: Iterable[int]) -> list[int]:
    """Those that have a GPU open."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [pid] if _has_gpu(pid) else []
    return found


def _has_gpu(pid: int) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(link).startswith(DEVICES):
                return True
    return False


@contextlib.contextmanager
def watched(pids: Iterable[int]) -> Iterator[list[int]]:
    """Their pidfds, by which `gone` tells when they have ended, whatever gets their numbers next."""
    pidfds = list[int]()
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfds.append(os.pidfd_open(pid))
        yield pidfds
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


async def gone(pidfds: Sequence[int], within_s: float) -> bool:
    """Wait until these processes have ended, for so long at most; returns whether they have."""
    loop, ended = asyncio.get_running_loop(), list[asyncio.Event]()
    try:
        for pidfd in pidfds:
            ended.append(asyncio.Event())
            loop.add_reader(pidfd, _ended, pidfd, ended[-1])
        async with asyncio.timeout(within_s):
            for one in ended:
                await one.wait()
    except TimeoutError:
        return False
    finally:
        for pidfd in pidfds:
            loop.remove_reader(pidfd)
    return True


def _ended(pidfd: int, event: asyncio.Event) -> None:
    """Once: a pidfd stays readable, and the loop would do nothing else while the others are waited for."""
    asyncio.get_running_loop().remove_reader(pidfd)
    event.set()
