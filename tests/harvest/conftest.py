"""A site of its own for each test of the harvester: the local cluster, and ledger and router as lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scavenger.cluster.local.client import LocalServer
from tests.harvest.world import World, layout


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with LocalServer(tmp_path / "cluster", layout()) as server:
        yield World(server.cluster(), server.dir, tmp_path / "state")
