"""The pipe between a guest's engine and the process that hosts it (`scavenger guest`): how many samples it may hold, and what it does.

    standard input    one number a line: leases from now on; its end: the host is gone, and so is this worker, soon
    standard output   one JSON object a line, after each number and each change of `memory`: `samples` (that the engine
                      generates), `peak` (the most since the last line), `memory`, `tokens` (generated since it began), `heard` (how
                      many numbers this is the outcome of)

Boundary: standard input and output of the worker process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

from scavenger.errors import ScavengerError
from scavenger.protocol.worker.events import Bounded, Terminate, WorkerEvent

#: A number of samples and its line's end.
MAX_LINE = 16


class HostFault(ScavengerError):
    """The host wrote something that is no number of samples."""


class HostPipe:
    """Reads numbers, writes lines. `post` gets the events."""

    def __init__(self, post: Callable[[WorkerEvent], None]) -> None:
        self._post = post
        self._heard = 0
        self._asked = True
        self._peak = 0
        self._memory = ""

    async def read(self) -> None:
        """Until the pipe ends, which ends the worker. Raises `HostFault`."""
        reader = asyncio.StreamReader(limit=MAX_LINE)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while line := await _line(reader):
            if not line.isascii() or not line.strip().isdigit():
                raise HostFault(f"the host wrote {line[:MAX_LINE]!r}", "it is one number of samples a line")
            self._post(Bounded(int(line)))
        self._post(Terminate("the process that hosts it has ended"))

    def heard(self) -> None:
        """The worker has acted upon one number more. One that was only read says nothing of the memory yet."""
        self._heard, self._asked = self._heard + 1, True

    def report(self, samples: int, memory: str, tokens: int) -> None:
        """Called after each event; writes a line where the host asked, or the memory's state changed."""
        self._peak = max(self._peak, samples)
        if not self._asked and memory == self._memory:
            return
        line = {
            "samples": samples,
            "peak": self._peak,
            "memory": memory,
            "tokens": tokens,
            "heard": self._heard,
        }
        self._asked, self._peak, self._memory = False, samples, memory
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError as error:  # longer than any number of samples
        raise HostFault(
            "the host wrote a line that is too long", "it is one number of samples a line"
        ) from error
