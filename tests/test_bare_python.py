"""A Python without the trainer's packages, as the bare wheel's: what needs them says so in two lines, before anything is booted."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scavenger.host import packages

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a Python: an environment with this one's packages but those."""
    place = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "v"], check=True)
    (site,) = (place / "v").glob("lib/python3*/site-packages")
    for kind in ("purelib", "platlib"):
        for path in Path(sysconfig.get_path(kind)).iterdir():
            if path.name not in packages.TRAINS and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    return place / "v" / "bin" / "python"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["scavenger", "demo", "--backend", "local", "--out", "out"], "the demo trains a model"),
        (["scavenger", "demo", "--compare", "--backend", "local", "--out", "out"], "the demo trains a model"),
        (["trainer", "run.toml", "--local"], "the trainer runs on torch"),
    ],
)
def test_it_is_told_what_it_lacks_and_how_to_get_it(
    bare: Path, words: list[str], what: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [bare, "-m", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert what in said
    assert "has no torch and no transformers" in said
    assert "pip install -c constraints.txt 'WHEEL[trainer,math]'" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == [], "nothing was booted"
