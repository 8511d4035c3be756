"""Real MPI: what one rank computes, two ranks compute; waiting costs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import AlgorithmSection, OptimizerSection
from scavenger.errors import ConfigError
from trainer import checkpoint, comm, publish
from trainer.launch import environment
from trainer.model import Learner

ROOT = Path(__file__).resolve().parents[2]


def launch(ranks: int, *arguments: str) -> None:
    environ = environment(os.environ, root=os.geteuid() == 0) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, str(Path(__file__).with_name("rank_program.py")), *arguments]
    start = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run([*start, *program], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def trained(ranks: int, seed: int, model: Path, out: Path) -> dict[str, Any]:
    launch(ranks, str(model), str(out), f"train:{seed}")
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["ranks"] == ranks
    return found


@pytest.mark.mpi
def test_one_and_two_ranks_take_the_same_step_in_any_order_of_arrival(model_folder: Path, tmp_path: Path) -> None:
    alone = trained(1, 0, model_folder, tmp_path / "one")
    both = trained(2, 5, model_folder, tmp_path / "two")
    again = trained(2, 6, model_folder, tmp_path / "three")
    assert both["root"] == again["root"], "bit by bit"
    assert alone["stats"] == both["stats"] == again["stats"]
    assert both["norm"] == pytest.approx(alone["norm"], rel=1e-12)


@pytest.mark.mpi
def test_a_checkpoint_of_two_ranks_resumes_on_one_bit_by_bit(model_folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    launch(2, str(model_folder), str(tmp_path / "out.json"), f"resume:{tmp_path}")
    path = checkpoint.select(tmp_path, "auto")
    assert path is not None
    state = checkpoint.read_state(path)
    learner = Learner(
        model_folder, mesh, algorithm=AlgorithmSection(), optimizer=OptimizerSection(), temperature=1.0, deterministic=True
    )
    checkpoint.load_shards(learner, path, state.updates_taken)
    manifest, _ = publish.build_version(1, publish.gather(learner, "float64"), "float64")
    assert manifest.root.hex() == state.root
    assert learner.updates_taken == 1
    moments = torch.cat([value.full_tensor().flatten() for name, value in learner.state().items() if name.startswith("exp_avg_sq")])  # type: ignore[attr-defined]
    assert moments.max() > 0


@pytest.mark.mpi
def test_an_idle_rank_uses_less_than_a_twentieth_of_a_core(model_folder: Path, tmp_path: Path) -> None:
    launch(2, str(model_folder), str(tmp_path / "idle"), "idle")
    assert json.loads((tmp_path / "idle").read_text())["cpu_s"] < 0.05 * 2.0


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 1),
        ({"SLURM_NTASKS": "2"}, 2),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, 4),
        ({"SLURM_NTASKS": "8", "OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMI_SIZE": "3"}, 3),
    ],
)
def test_the_launcher_says_how_many_ranks_to_expect(environ: dict[str, str], expected: int) -> None:
    assert comm.expected_size(environ)[0] == expected


def test_ranks_that_do_not_see_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"world of 1 rank\(s\), but SLURM_NTASKS says 2"):
        comm.check_size(1, {"SLURM_NTASKS": "2"})
