"""Sources that tests publish to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scavenger.weights.source import WeightSource


@pytest.fixture(params=["tcp", "curve"])
def source(request: pytest.FixtureRequest) -> Iterator[WeightSource]:
    with WeightSource(encrypt=request.param == "curve") as made:
        yield made


@pytest.fixture
def tcp() -> Iterator[WeightSource]:
    with WeightSource() as made:
        yield made
