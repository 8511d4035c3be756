"""Fixtures of the system tests: one model, and the undisturbed run that the others are compared with.

What all of them together may cost is in `CONTRIBUTING.md`: a run that lasts longer than the undisturbed one needs more of its steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

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
    """Twelve steps by one reserved engine alone."""
    return play.undisturbed(small_model, tmp_path_factory.mktemp("undisturbed"), 12)
