"""Waits for an event in asyncio, and no longer than so long.

In place of `asyncio.wait_for`, which ruff forbids here: until Python 3.12 a cancellation that comes in the turn of the loop in which the
event does is lost in it, and with it the deadline, or the end of the program, that it was to bring.
"""

from __future__ import annotations

import asyncio
import contextlib


async def within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set, as soon as it is and after `seconds` at the latest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
