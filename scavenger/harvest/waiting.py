"""Waiting for whichever comes first of several events and a time. Knows nothing of what the events mean."""

from __future__ import annotations

import asyncio


async def first(*events: asyncio.Event, timeout_s: float) -> None:
    """Wait until one of the events is set, for `timeout_s` at most."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
