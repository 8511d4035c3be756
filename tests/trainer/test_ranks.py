"""Real MPI: what one rank computes, two ranks compute; waiting costs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import AlgorithmSection, OptimizerSection
from scavenger.errors import ConfigError
from scavenger.weights import manifest as manifests
from tests.trainer import published
from tests.trainer.published import Kept
from tests.trainer.rank_program import GROUPS, PACKED_OPTIMIZER, train
from tests.trainer.rows import make_group
from trainer.algorithms.rows import resolve
from trainer.checkpoint import checkpoint
from trainer.launch import environment
from trainer.loop import comm
from trainer.loop.publish import Publisher
from trainer.loop.ranks import Ranks
from trainer.model import adapters
from trainer.model.learner import Learner, load_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def together(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two ranks left behind (see `rank_program`)."""
    out = tmp_path_factory.mktemp("ranks")
    launch(2, str(model_folder), str(out))
    return out


def launch(ranks: int, *arguments: str) -> None:
    environ = environment(os.environ, root=os.geteuid() == 0) | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    program = [sys.executable, str(Path(__file__).with_name("rank_program.py")), *arguments]
    done = subprocess.run(
        ["mpirun", "-n", str(ranks), *program],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def found(folder: Path) -> Any:
    return json.loads((folder / "found.json").read_text())


def make_learner(folder: Path, mesh: DeviceMesh) -> Learner:
    return Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(), 8),
        optimizer=OptimizerSection(lr=1e-3),
        temperature=1.0,
        deterministic=True,
    )


@pytest.mark.mpi
def test_one_and_two_ranks_take_the_same_step_in_any_order_of_arrival(
    together: Path, model_folder: Path, mesh: DeviceMesh
) -> None:
    alone = json.loads(
        json.dumps(train(Ranks(comm.Solo(), make_learner(model_folder, mesh), Publisher(Kept())), 0))
    )
    both, again = found(together)["steps"]
    assert found(together)["ranks"] == 2
    assert both["root"] == again["root"], "bit by bit"
    assert alone["stats"] == both["stats"] == again["stats"]
    assert both["norm"] == pytest.approx(alone["norm"], rel=1e-12)


def loaded(out: Path, model_folder: Path, mesh: DeviceMesh) -> Learner:
    """One process with the newest checkpoint of `out`."""
    path = checkpoint.select(out, "auto")
    assert path is not None
    learner = make_learner(model_folder, mesh)
    checkpoint.load_shards(learner, path, checkpoint.read_state(path).updates_taken)
    return learner


def same_state(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Bit by bit."""
    whole = {name: adapters.whole(value) for name, value in ours.items()}
    return whole.keys() == theirs.keys() and all(
        torch.equal(value, adapters.whole(theirs[name])) for name, value in whole.items()
    )


@pytest.mark.mpi
def test_a_checkpoint_of_two_ranks_resumes_on_one_bit_by_bit(
    together: Path, model_folder: Path, mesh: DeviceMesh
) -> None:
    """Parameters and optimizer state as the ranks held them when it was begun; the step taken while it was written is not in it."""
    learner = loaded(together, model_folder, mesh)
    shards = [load_file(together / f"rank-{rank}.safetensors") for rank in range(2)]
    assert same_state(learner.state(), {name: torch.cat([one[name] for one in shards]) for name in shards[0]})
    assert learner.updates_taken == 1
    manifest, _ = published.build_version(1, learner, "float64")
    assert manifest.root.hex() == found(together)["steps"][1]["root"] != found(together)["later"]


@pytest.mark.mpi
@pytest.mark.long
def test_a_checkpoint_of_two_ranks_resumes_on_four_bit_by_bit(
    together: Path, model_folder: Path, mesh: DeviceMesh
) -> None:
    """Four ranks load it and write it anew: nothing changed."""
    launch(4, str(model_folder), str(together), "again")
    assert len(list((together / "again").glob("checkpoints/step-00000001/*.safetensors"))) == 4
    first, second = (loaded(out, model_folder, mesh) for out in (together, together / "again"))
    assert same_state(first.state(), second.state())
    assert second.updates_taken == 1


@pytest.mark.mpi
def test_two_ranks_take_the_packed_step_of_one_plain_process(together: Path, model_folder: Path) -> None:
    """Plain: transformers' model, one sample at a time, torch's AdamW. Loss, gradient norm and the weights after the step agree."""
    model = load_model(model_folder, torch.float32, "eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=PACKED_OPTIMIZER.betas, weight_decay=0.1)
    rows = [row for number in range(GROUPS) for row in make_group(number)]
    losses = []
    for row in rows:
        text = torch.frombuffer(bytearray(row.prompt + row.completion), dtype=torch.int32).long()
        first = len(row.prompt) // 4
        logprobs = model(input_ids=text[None, :-1]).logits[0, first - 1 :].log_softmax(-1)
        current = logprobs.gather(-1, text[first:, None])[:, 0]
        weight = (
            (current.detach() - torch.frombuffer(bytearray(row.behaviour), dtype=torch.float32))
            .exp()
            .clamp(max=2.0)
        )
        losses.append(-(weight * (current - current.detach()).mean().exp() * row.advantage).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    packed = found(together)["packed"]
    assert packed["samples"] == len(rows)
    assert packed["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert packed["norm"] == pytest.approx(norm.item(), rel=1e-5)
    plain = {
        name: value.detach().contiguous().view(-1).view(torch.uint8).numpy()
        for name, value in model.named_parameters()
    }
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    _, blob = manifests.build(
        1, {name: ("float32", shapes[name], memoryview(raw)) for name, raw in plain.items()}
    )
    theirs = torch.frombuffer(bytearray((together / "packed.bin").read_bytes()), dtype=torch.float32)
    ours = torch.frombuffer(bytearray(blob), dtype=torch.float32)
    # Adam's first step is lr * sign(gradient): where a gradient is rounding, so is its sign.
    assert ((ours - theirs).abs() < 1e-6).double().mean() > 0.999


@pytest.mark.mpi
def test_an_idle_rank_uses_less_than_a_twentieth_of_a_core(together: Path) -> None:
    assert found(together)["idle_cpu_s"] < 0.05 * 2.0


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
