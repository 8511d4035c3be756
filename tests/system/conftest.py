"""Fixtures of the system tests: one model, and the undisturbed run that the others are compared with.

What all of them together may cost is in `CONTRIBUTING.md`: a run that lasts longer than the undisturbed one needs more of its steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import Site, SiteOptions
from tests.system import play
from tests.system.model import write_small_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two narrow layers with the sorting task's tokenizer."""
    path = tmp_path_factory.mktemp("small-model")
    write_small_model(path)
    return path


@pytest.fixture(scope="session")
def undisturbed(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> play.Result:
    """Twelve steps by one reserved engine alone, nobody preempted, on the local backend."""
    options = SiteOptions("local", tmp_path_factory.mktemp("undisturbed"), demo_layout(grace_s=1.0), observe_s=0.2)
    with Site(options) as site:
        run = play.write_run(site, small_model, run={"harvest": False, "steps": 12}, engine={"max_batch": 16})
        play.finish(site, play.submit(site, run))
        return play.result(site)
