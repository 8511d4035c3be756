"""Equal scenarios are decided equally, whatever the process: no order of a set, no hash and no clock gets into a decision."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.baselines.registry import SIMULATED_POLICIES
from tests.simulate.digest import digest, small

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from tests.simulate import digest as d; print(d.digest(d.small(5, 2), d.SIMULATED_POLICIES[sys.argv[1]])[0])"


@pytest.mark.parametrize("name", ["ours", "rlboost"])
def test_another_process_with_other_hashes_decides_the_same(name: str) -> None:
    found, answers = digest(small(5, 2), SIMULATED_POLICIES[name])
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == found
    assert answers > 500


def test_other_seeds_and_policies_are_told_apart() -> None:
    """Under one name: a policy's name is in its outcome, and would tell them apart by itself."""
    simulated_policies = [replace(SIMULATED_POLICIES[name], name="x") for name in ("ours", "rlboost")]
    assert len({digest(small(seed, 1), one)[0] for seed in (5, 6) for one in simulated_policies}) == 4
