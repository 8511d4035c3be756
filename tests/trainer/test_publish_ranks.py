"""Sharded sources on real MPI ranks: what they publish together is what one gather gives, and no rank has it all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.publish_program import VERSIONS
from trainer.launch import environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = 4096

pytestmark = pytest.mark.mpi


def found(ranks: int, model: Path, out: Path) -> Any:
    environ = environment(os.environ, root=os.geteuid() == 0) | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    program = [sys.executable, str(Path(__file__).with_name("publish_program.py")), str(model), str(out)]
    done = subprocess.run(
        ["mpirun", "-n", str(ranks), *program],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / f"found-{ranks}.json").read_text())


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(1, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
def test_ranks_publish_together_what_a_gather_gives(ranks: int, model_folder: Path, tmp_path: Path) -> None:
    for kind, told in found(ranks, model_folder, tmp_path).items():
        assert told["equal"] == [True] * VERSIONS, kind
        assert told["spooled"]
        assert told["left"] == []
        if kind == "narrow":  # who has no row of A has the most of no chunk, and serves nothing
            assert told["sources"] == len(told["owners"]) == 2
            continue
        assert told["sources"] == ranks
        assert told["owners"] == (list(range(ranks)) if ranks > 1 else [])
        assert told["complete"] == [ranks == 1] * ranks
        if kind == "all":  # the other one's memory is handed to its neighbour
            assert told["deltas"][0] == 0
            assert min(told["deltas"][1:]) > 0.8 * told["total"] / PAGE, (
                "every rank gives deltas of its own chunks"
            )
        share = told["total"] / ranks
        assert all(nbytes < 1.35 * share + 60 * PAGE for nbytes in told["nbytes"]), (
            "a rank's memory is its share, and borders"
        )
        assert all(count <= 4 for count in told["buffers"]), "memory is used again"
        if ranks > 1:
            assert f"of rank {ranks - 1} missing" in told["dead"]
            assert told["relayed"]
