"""The model of memory is right: what it predicts of a rank's GPU is what the account measures while the trainer's own step runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from rollout.engines import account
from rollout.engines.account import OverCapacity, Shared
from scavenger.config import AlgorithmSection, OptimizerSection, TrainerSection
from scavenger.sizing import phases, training
from tests.trainer.memory_cases import CASES, QWEN, Case
from tests.trainer.memory_program import micro, write_model
from trainer.algorithms.rows import resolve
from trainer.model.learner import Learner
from trainer.model.memory import RankGpu

ROOT = Path(__file__).resolve().parents[2]
#: All cases take 45 s, and several times as long beside other work.
pytestmark = pytest.mark.timeout(500)
Measured = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Every case, one after another in one process."""
    out = tmp_path_factory.mktemp("memory") / "measured.json"
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    program = str(Path(__file__).with_name("memory_program.py"))
    done = subprocess.run(
        [sys.executable, program, str(out), *CASES],
        env=environ,
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: Measured = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_phase_takes_what_is_predicted(measured: Measured, name: str) -> None:
    case, found = CASES[name], measured[name]
    rows = phases.table(case.shape, case.job)
    said = {phase: phases.device_nbytes(rows, phase) for phase in phases.PHASES}
    told = f"{name}: measured {found}, predicted {said}"
    assert max(said["forward"], said["backward"]) == pytest.approx(found["step"], rel=0.1), told
    assert said["load"] == pytest.approx(found["load"], rel=0.02), told
    assert said["optimizer"] == pytest.approx(found["optimizer"], rel=0.1), told
    away = replace(case.job, reserved=True, engine_share=0.0, offload="always")
    assert phases.device_nbytes(phases.table(case.shape, away), "generate") == found["generate"] == 0
    assert said["to_training"] - training.states(case.shape, case.job).gradients == pytest.approx(
        found["to_training"], rel=0.02
    )


def test_experts_count_with_all_that_there_are_and_tokens_with_those_that_they_go_to(
    measured: Measured,
) -> None:
    dense, experts = CASES["dense"].shape, CASES["experts"].shape
    assert experts.parameters > 1.5 * dense.parameters
    assert measured["experts"]["load"] > 1.5 * measured["dense"]["load"]
    more = replace(experts, chosen=4)
    grown = training.step_nbytes(more, CASES["experts"].job) - training.step_nbytes(
        experts, CASES["experts"].job
    )
    assert grown > 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, QWEN)
    return tmp_path


def train(folder: Path, mesh: DeviceMesh, case: Case, gpu: Shared) -> None:
    learner = Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(), 8),
        optimizer=OptimizerSection(lr=1e-3),
        temperature=1.0,
        deterministic=False,
        trainer=TrainerSection(compute_dtype="bfloat16", activation_checkpointing=case.recompute),
        gpu=RankGpu(gpu),
    )
    for _ in range(2):
        learner.train(micro(case))
    learner.update(2.0, 1e-3)


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[list[Shared]]:
    opened: list[Shared] = []
    yield opened
    for one in opened:
        one.close()


def test_a_gpu_a_tenth_larger_than_predicted_does_and_one_a_tenth_smaller_does_not(
    folder: Path, mesh: DeviceMesh, tmp_path: Path, limited: list[Shared]
) -> None:
    case = Case(QWEN, 1, 256)
    rows = phases.table(case.shape, case.job)
    said = max(phases.device_nbytes(rows, phase) for phase in phases.PHASES)

    def gpu(share: float) -> Shared:
        path = account.create(tmp_path / f"gpu-{share}", int(share * said))
        limited.append(Shared(path, 0, "rank 0"))
        return limited[-1]

    train(folder, mesh, case, gpu(1.1))
    with pytest.raises(OverCapacity):
        train(folder, mesh, case, gpu(0.9))
