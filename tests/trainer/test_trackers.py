"""W&B, TensorBoard and MLflow as they are: the tests of tests/trainer/test_monitor.py that need one, where all three are installed.

They are in no environment of ours, so those tests are skipped elsewhere. Here a virtual environment beside
this one gets them from the package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/trainer/test_monitor.py"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_each_tracker_gets_a_run_s_figures(tmp_path: Path) -> None:
    made = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True, timeout=120)
    (site,) = made.glob("lib/python3*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(made), "install", "--quiet", "-c", "constraints.txt"]
    asked = ["wandb>=0.17", "tensorboard>=2.14", "mlflow-skinny>=3"]  # as setup.py asks
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert all(f'"{one}"' in setup for one in asked)
    done = subprocess.run([*pip, *asked], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ran = subprocess.run(
        [made / "bin/python", "-m", "pytest", "-m", "", "-rs", "-n", "0", TESTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "skipped" not in ran.stdout, ran.stdout[-2000:]
    needing = len(re.findall(r"^@needs_", (ROOT / TESTS).read_text(encoding="utf-8"), re.M))
    assert needing == 4
