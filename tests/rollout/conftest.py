"""One of each engine kind for the whole session: a vLLM engine takes seconds to start, so tests share those of equal spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def kinds() -> Iterator[dict[str, Any]]:
    from tests.rollout.kinds import Reference, Vllm

    made: dict[str, Any] = {"reference": Reference(), "vllm": Vllm()}
    yield made
    made["vllm"].close()


@pytest.fixture
def kind(request: pytest.FixtureRequest, kinds: dict[str, Any]) -> Any:
    return kinds[request.param]
