"""Waiting for whichever comes first of several events and a time, and for how long at most. Knows nothing of what the events mean.

Waits for an event in asyncio, and no longer than so long.

In place of `asyncio.wait_for`, which ruff forbids here: until Python 3.12 a cancellation that comes in the turn of the loop in which the
event does is lost in it, and with it the deadline, or the end of the program, that it was to bring.

And the socket that an asyncio server is given, in one place for the same reason: asyncio's own default is not what we need.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")


def listening_socket(host: str, port: int, backlog: int = 1024) -> socket.socket:
    """A TCP socket that listens at `host`, an address of IPv4 or IPv6, for a server of asyncio. Raises `OSError`.

    Its protocol is named: where it is not, asyncio leaves Nagle's algorithm on, and small packets of a connection wait 40 ms.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(backlog)
    except OSError:
        made.close()
        raise
    return made


async def within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set, as soon as it is and after `seconds` at the latest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def written(write: Callable[[], None], *, at_end_s: float | None = None) -> None:
    """`write` beside the event loop. Cancelled, it waits all the same: else this file could come after its writer's last one. So long
    at most, where the folder may be one that hangs (`at_end_s`; None: to its end).
    """
    writing = asyncio.create_task(asyncio.to_thread(write))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing], timeout=at_end_s)
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


#: A disk or a file server that is busy is not one that hangs, however quick the looks.
LEAST_S = 5.0


def cycle_timeout_s(fast_poll_interval_s: float) -> float:
    """How long a cycle waits for the ledger, or for the stop files, before it goes on without."""
    return max(LEAST_S, fast_poll_interval_s)


async def first(*events: asyncio.Event, timeout_s: float) -> None:
    """Wait until one of the events is set, for `timeout_s` at most."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class HungUp(Exception):
    """Who asked has gone."""


async def unless_gone(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], work: Coroutine[Any, Any, T]
) -> T:
    """The result of `work`, which ends as soon as the caller of an ASGI application hangs up. `receive`: the request's, whose body was
    read. Raises `HungUp`.
    """

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.create_task(work), asyncio.create_task(hang_up())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HungUp
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
