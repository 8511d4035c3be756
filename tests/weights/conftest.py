"""Sources that tests publish to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scavenger.weights.source import WeightServer


@pytest.fixture(params=["tcp", "curve"])
def source(request: pytest.FixtureRequest) -> Iterator[WeightServer]:
    with WeightServer(encrypt=request.param == "curve") as made:
        yield made


@pytest.fixture
def tcp() -> Iterator[WeightServer]:
    with WeightServer() as made:
        yield made
