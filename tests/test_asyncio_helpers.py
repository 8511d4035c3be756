"""A wait for an event loses neither the event, nor a cancellation, nor the deadline around it, in whatever order they come."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from scavenger.asyncio_helpers import within


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_it_says_whether_the_event_came_in_time() -> None:
    async def main() -> None:
        event = asyncio.Event()
        assert not await within(event, 0.0)
        assert not await within(event, 0.01)
        asyncio.get_running_loop().call_soon(event.set)
        assert await within(event, 60.0)
        assert await within(event, 0.0)

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_soon_after_the_event_is_not_lost(turns: int) -> None:
    async def main() -> None:
        event = asyncio.Event()

        async def for_ever() -> None:
            while True:
                await within(event, 60.0)
                event.clear()

        task = asyncio.create_task(for_ever())
        await _turns(2)
        event.set()
        await _turns(turns)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5.0)
        assert done, "it goes on as if nobody had cancelled it"
        assert task.cancelled()

    asyncio.run(main())


def test_a_deadline_ends_a_loop_that_is_woken_all_the_time() -> None:
    async def main() -> None:
        event, over = asyncio.Event(), asyncio.Event()

        async def wake() -> None:
            while not over.is_set():
                event.set()
                await asyncio.sleep(0)

        async def wait() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    while True:
                        await within(event, 0.01)
                        event.clear()
            over.set()

        async with asyncio.timeout(10.0):
            await asyncio.gather(wake(), wait())

    asyncio.run(main())
