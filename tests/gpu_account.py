"""Another process that shares a GPU, as the account of its memory has it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def other_process(path: Path, program: str, who: str = "engine 0") -> Iterator[subprocess.Popen[str]]:
    """It has done `program` with its account `one`, and lives until the end."""
    opened = f"from rollout.engines.account import Shared; from pathlib import Path; one = Shared(Path({str(path)!r}), 0, {who!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{opened}\n{program}\nprint('done', flush=True); input()"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        yield process
    finally:
        process.kill()
        process.communicate()
