"""examples/tiny-cpu runs as its README says, smaller."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]
NO_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """pytest's own folders, in one of several processes, are too long for the name of a socket below them."""
    with tempfile.TemporaryDirectory(prefix="tiny-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    "engine", ["reference", pytest.param("", marks=[pytest.mark.vllm, NO_VLLM], id="vllm")]
)
def test_the_example_plays_to_its_end_and_leaves_nothing(engine: str, short_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "examples" / "tiny-cpu" / "play.py"), "--out", str(short_path / "out")]
    argv += ["--engine", engine] if engine else []
    argv += [
        "--steps",
        "2",
        "--prompts",
        "4",
        "--eval-prompts",
        "8",
        "--warm-up",
        "3",
        "--engines",
        "1",
        "--preempt-every-s",
        "0",
    ]
    done = subprocess.run(
        argv,
        cwd=short_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "REFUSED" not in done.stdout
    drafted = (short_path / "out" / "sorting" / "run.toml").read_text()
    assert f'name = "{engine or "vllm"}"' in drafted, "vLLM is the default"
    lines = [
        json.loads(line)
        for line in (short_path / "out" / "sorting" / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
    ]
    left = [words for words in map(_words, psutil.process_iter()) if str(short_path) in " ".join(words)]
    assert not left


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has just ended
        return []
