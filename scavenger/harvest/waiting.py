"""Waiting for whichever comes first of several events and a time, and for how long at most. Knows nothing of what the events mean."""

from __future__ import annotations

import asyncio

#: A disk or a file server that is busy is not one that hangs, however quick the looks.
LEAST_S = 5.0


def patience_s(quick_s: float) -> float:
    """How long a cycle waits for the ledger, or for the stop files, before it goes on without."""
    return max(LEAST_S, quick_s)


async def first(*events: asyncio.Event, timeout_s: float) -> None:
    """Wait until one of the events is set, for `timeout_s` at most."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
