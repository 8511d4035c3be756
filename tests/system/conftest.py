"""Fixtures of the system tests: one model, and the undisturbed run that the others are compared with.

What all of them together may cost is in `CONTRIBUTING.md`: a run that lasts longer than the undisturbed one needs more of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scavenger.cluster.sandbox.hosts import SMALL_SITE, SiteSandbox
from tests.system import play, site_run
from tests.system.model import write_small_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two narrow layers with the sorting task's tokenizer."""
    path = tmp_path_factory.mktemp("small-model")
    write_small_model(path)
    return path


@pytest.fixture(scope="session")
def undisturbed(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> play.Result:
    """Twelve steps by one reserved engine alone."""
    return play.undisturbed(small_model, tmp_path_factory.mktemp("undisturbed"), 12)


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SiteSandbox]:
    """Nine hosts. Marked with `needs("bindfs")`: the shared folder may hang."""
    marked = request.node.get_closest_marker("needs")
    may_hang = marked is not None and "bindfs" in marked.args
    with site_run.booted(tmp_path / "site", may_hang=may_hang) as booted:
        yield booted


@pytest.fixture
def small_site(tmp_path: Path) -> Iterator[SiteSandbox]:
    with site_run.booted(tmp_path / "site", SMALL_SITE) as booted:
        yield booted
