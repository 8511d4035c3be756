"""One of each engine kind for all tests here, because a vLLM engine takes seconds to start; and a stage for a worker in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.stage import QUICK, Play, Stage


@pytest.fixture(scope="package")
def kinds() -> Iterator[dict[str, Any]]:
    from tests.rollout.kinds import Reference, Vllm

    made: dict[str, Any] = {"reference": Reference(), "vllm": Vllm()}
    yield made
    made["vllm"].close()


@pytest.fixture
def kind(request: pytest.FixtureRequest, kinds: dict[str, Any]) -> Any:
    return kinds[request.param]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Run a test's coroutine on a stage, and clear the stage."""

    def run(scene: Callable[[Stage], Awaitable[None]]) -> None:
        async def main() -> None:
            stage = Stage(tmp_path, QUICK)
            try:
                await asyncio.wait_for(scene(stage), 90.0)
            finally:
                stage.worker.cancel()
                await asyncio.gather(stage.worker, return_exceptions=True)
                stage.daemon.close()
                stage.source.close()

        asyncio.run(main())

    return run
