"""A missing service is a skip with its reason on a user's machine, and a failure where it is required."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"
GPU_TEST = "import pytest\n@pytest.mark.gpu\ndef test_on_a_gpu(): pass\n"

pytestmark = pytest.mark.skipif(
    Path("/dev/nvidia0").exists(), reason="the GPU stands for the service that is missing"
)


def outcome(folder: Path, require: str) -> tuple[int, str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_it.py").write_text(GPU_TEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-ra",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            str(folder),
        ],
        env={**os.environ, "SCAVENGER_REQUIRE": require, "PYTHONPATH": str(CONFTEST.parents[1])},
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_missing_service_is_a_skip_with_its_reason(tmp_path: Path) -> None:
    status, told = outcome(tmp_path, require="")
    assert status == 0
    assert "needs gpu: no NVIDIA GPU here" in told
    assert told.splitlines()[-2] == "NOT RUN: 1 test, needs gpu: no NVIDIA GPU here", (
        "the last thing before the summary"
    )


def test_a_missing_service_that_is_required_is_a_failure(tmp_path: Path) -> None:
    status, told = outcome(tmp_path, require="gpu, slurm")
    assert status == 1
    assert "SCAVENGER_REQUIRE asks for gpu" in told


def test_a_required_service_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    status, told = outcome(tmp_path, require="slrum")
    assert status == 4
    assert "names ['slrum']" in told
