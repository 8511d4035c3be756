"""Which Python has `verifiers`: this one, or the one that a variable names. Tests that need it are skipped without either."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

VARIABLE = "SCAVENGER_VERIFIERS_PYTHON"


def python_with_verifiers() -> str | None:
    """An interpreter that has the package."""
    if named := os.environ.get(VARIABLE):
        return named
    return sys.executable if importlib.util.find_spec("verifiers") is not None else None


needs_verifiers = pytest.mark.skipif(
    python_with_verifiers() is None,
    reason=f"verifiers 0.4 is not installed, and {VARIABLE} names no Python with it",
)
