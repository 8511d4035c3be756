"""A tokenizer's process gets as long as a busy machine takes to start it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scavenger.web import texts


@pytest.fixture(autouse=True, scope="session")
def _patient_texts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "WALL_S", 120.0)
        yield
