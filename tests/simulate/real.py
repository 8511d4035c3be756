"""Where the real traces are, for tests that compare with them: the environment variable SCAVENGER_TRACES, set by whoever has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TRACES = Path(os.environ.get("SCAVENGER_TRACES", ""))
needs_traces = pytest.mark.skipif(
    not os.environ.get("SCAVENGER_TRACES"),
    reason="needs the real traces: set SCAVENGER_TRACES to their folder",
)
