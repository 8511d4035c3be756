from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from rollout.engines.norms import wide_norms
from scavenger.config import AlgorithmSection, OptimizerSection
from scavenger.errors import ConfigError, Diverged
from scavenger.weights import manifest as manifests
from tests.trainer import published
from tests.trainer.rows import make_group
from trainer.algorithms.rows import resolve
from trainer.checkpoint import checkpoint
from trainer.checkpoint.saving import Saver
from trainer.data.batching import Micro, filler, one_per_group, pack
from trainer.model.learner import Learner, learning_rate, load_model
from trainer.model.sharding import quantise_

F64 = torch.float64


def make_learner(folder: Path, mesh: DeviceMesh, *, deterministic: bool = True, **algorithm: Any) -> Learner:
    settings = OptimizerSection(lr=1e-3, clip_norm=1e9)
    return Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(**algorithm), 8),
        optimizer=settings,
        temperature=0.7,
        deterministic=deterministic,
    )


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor().clone() for name, p in learner.model.named_parameters()}


def plain_gradients(folder: Path, micro: Micro) -> dict[str, torch.Tensor]:
    """One big batch through a plain model, with none of the learner's machinery."""
    model = load_model(folder, F64)
    wide_norms(model)
    loss = torch.zeros((), dtype=F64)
    for row in micro.rows:
        text = torch.frombuffer(bytearray(row.prompt + row.completion), dtype=torch.int32).long()
        first = len(row.prompt) // 4
        logits = model(input_ids=text[None, :-1]).logits[0, first - 1 :] / 0.7
        current = logits.log_softmax(-1).gather(-1, text[first:, None])[:, 0]
        behaviour = torch.frombuffer(bytearray(row.behaviour), dtype=torch.float32).double()
        weight = (current.detach() - behaviour).exp().clamp(max=2.0)
        loss = loss - row.advantage * (weight * (current - current.detach()).exp()).mean()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (difference / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5


def test_a_step_s_gradient_is_that_of_one_big_batch_in_any_order(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    groups = [make_group(number) for number in range(6)]
    expected = plain_gradients(model_folder, pack(groups, budget=10**6)[0])
    learner = make_learner(model_folder, mesh)
    seen = []
    for seed in range(4):
        for micro in one_per_group(random.Random(seed).sample(groups, 6), width=15):
            learner.train(micro)
        seen.append(gradients(learner))
        learner.discard_gradients()
        assert relative(seen[-1], expected) < 1e-9
    for other in seen[1:]:
        assert all(torch.equal(seen[0][name], other[name]) for name in other), (
            "exact sums do not depend on the order"
        )


def test_packing_in_float32_agrees_to_rounding(model_folder: Path, mesh: DeviceMesh) -> None:
    groups = [make_group(number) for number in range(6)]
    learner = make_learner(model_folder, mesh, deterministic=False)
    for micro in pack(groups, budget=60):
        learner.train(micro)
    assert relative(gradients(learner), plain_gradients(model_folder, pack(groups, budget=10**6)[0])) < 1e-5


def test_a_filler_adds_exactly_nothing(model_folder: Path, mesh: DeviceMesh) -> None:
    learner = make_learner(model_folder, mesh)
    assert learner.train(filler(one_per_group([make_group(0)], width=15)[0])) == ()
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients(learner).values())
    learner.discard_gradients()


def test_rounding_to_the_quantum_makes_sums_independent_of_order() -> None:
    values = torch.randn(1000, dtype=F64, generator=torch.Generator().manual_seed(0))
    quantise_(values)
    total = values.sum()
    for seed in range(5):
        shuffled = values[torch.randperm(1000, generator=torch.Generator().manual_seed(seed))]
        assert torch.equal(torch.stack([shuffled[:300].sum(), shuffled[300:].sum()]).sum(), total)


def test_the_denominator_is_applied_once_and_reported_before_clipping(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    learner = make_learner(model_folder, mesh)
    micro = one_per_group([make_group(0)], width=15)[0]
    learner.train(micro)
    one = learner.update(1, lr=0.0)
    learner.train(micro)
    assert learner.update(10, lr=0.0) == pytest.approx(one / 10, rel=1e-12)


def test_with_proximal_logprobs_of_the_same_weights_nothing_changes(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    import msgspec

    learner = make_learner(model_folder, mesh)
    micro = one_per_group([make_group(0)], width=15)[0]
    learner.train(micro)
    expected = gradients(learner)
    learner.discard_gradients()
    proximal = learner.proximal(micro)
    rows = tuple(msgspec.structs.replace(row, proximal=proximal[row.sample_id]) for row in micro.rows)
    learner.train(Micro(rows, micro.width))
    assert relative(gradients(learner), expected) < 1e-12
    learner.discard_gradients()
    assert set(learner.state()) >= {"model.lm_head.weight", "model.model.embed_tokens.weight"} & set(
        learner.state()
    )


def test_a_reference_model_of_the_same_weights_has_no_kl(model_folder: Path, mesh: DeviceMesh) -> None:
    learner = make_learner(model_folder, mesh, kl_coef=0.1)
    stats = learner.train(one_per_group([make_group(0)], width=15)[0])
    assert [one.kl for one in stats] == [0.0] * len(stats)
    learner.update(10, lr=1e-2)
    stats = learner.train(one_per_group([make_group(0)], width=15)[0])
    assert all(one.kl > 0 for one in stats)


def test_published_weights_are_the_model_s_and_tied_ones_come_once(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    learner = make_learner(model_folder, mesh)
    manifest, blob = published.build_version(3, learner, "float64")
    views = {view.name: view for view in manifests.views(manifest, blob.view)}
    plain = dict(load_model(model_folder, F64).named_parameters())
    assert set(views) == set(plain)
    assert "lm_head.weight" not in views
    for name, parameter in plain.items():
        assert torch.equal(
            torch.frombuffer(bytearray(views[name].data), dtype=F64).view(parameter.shape), parameter.detach()
        )
    cast, _ = published.build_version(4, learner, "bfloat16")
    assert cast.total_nbytes * 4 == manifest.total_nbytes


def write(learner: Learner, path: Path) -> None:
    saver = Saver()
    saver.begin(learner.state(), path)
    saver.wait()


def test_a_resumed_learner_goes_on_bit_by_bit(model_folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    micros = one_per_group([make_group(number) for number in range(3)], width=15)
    learner = make_learner(model_folder, mesh)
    learner.train(micros[0])
    learner.update(20, lr=1e-3)
    write(learner, checkpoint.prepare(tmp_path, 1, 0))
    state = checkpoint.CheckpointState(1, 2, "00", 3, 0, learner.updates_taken, "float64")
    assert checkpoint.select(tmp_path, "auto") is None, "incomplete until renamed"
    final = checkpoint.complete(tmp_path, state)
    other = make_learner(model_folder, mesh)
    checkpoint.load_shards(other, final, checkpoint.read_state(final).updates_taken)
    for one in (learner, other):
        one.train(micros[1])
        one.update(20, lr=1e-3)
    mine, theirs = learner.state(), other.state()
    assert all(torch.equal(mine[name].full_tensor(), theirs[name].full_tensor()) for name in mine)  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_takes_no_step_and_says_what_to_do(
    model_folder: Path, mesh: DeviceMesh, value: float
) -> None:
    learner = make_learner(model_folder, mesh, deterministic=False)
    learner.train(one_per_group([make_group(0)], width=15)[0])
    before = {name: tensor.full_tensor().clone() for name, tensor in learner.state().items()}  # type: ignore[attr-defined]
    next(p.grad for p in learner.model.parameters() if p.grad is not None).mul_(value)
    with pytest.raises(Diverged, match=r"the step was not taken\n.*optimizer\.lr(.|\n)*--resume DIR"):
        learner.update(20, lr=1e-3)
    after = learner.state()
    assert all(torch.equal(before[name], after[name].full_tensor()) for name in before)  # type: ignore[attr-defined]


def test_a_checkpoint_of_another_model_or_a_damaged_one_is_told_not_loaded(
    model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    learner = make_learner(model_folder, mesh)
    path = checkpoint.prepare(tmp_path, 1, 0)
    write(learner, path)
    shapes = {name: tuple(value.shape) for name, value in learner.state().items()}
    checkpoint.check_shapes(path, shapes)
    fewer = {name: shape for name, shape in shapes.items() if "layers.1" not in name}
    other = shapes | {"model.model.norm.weight": (7,)}
    for wanted, first in (
        (fewer, "layers.1"),
        (other, "model.model.norm.weight"),
        (shapes | {"exp_avg.x": (1,)}, "exp_avg.x"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"does not hold what this run trains, first: .*{first}.*\n.*model\.path or \[lora\]",
        ):
            checkpoint.check_shapes(path, wanted)
    (shard,) = path.glob("*.safetensors")
    whole = shard.read_bytes()
    for left in (whole[:1000], whole[: len(whole) // 2]):
        shard.write_bytes(left)
        with pytest.raises(ConfigError, match=r"cannot be read: .*\n.*--resume"):
            checkpoint.load_shards(learner, path, 1)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"does not hold(.|\n)*files of the checkpoint are gone"):
        checkpoint.load_shards(learner, path, 1)


def test_only_the_newest_checkpoints_are_kept(model_folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    learner = make_learner(model_folder, mesh)
    for step in (2, 4, 6):
        write(learner, checkpoint.prepare(tmp_path, step, 0))
        path = checkpoint.complete(tmp_path, checkpoint.CheckpointState(step, 1, "", 0, 0, 0, "float64"))
        checkpoint.delete(checkpoint.surplus(tmp_path, path, keep=2).going)
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step-00000004", "step-00000006"]
    newest = checkpoint.select(tmp_path, "auto")
    assert newest is not None
    assert newest.name == "step-00000006"
    assert checkpoint.select(tmp_path, "none") is None
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        checkpoint.read_state(tmp_path)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 1.0, 0.55, 0.1]),
        ("cosine", [0.25, 1.0, 0.55, 0.1]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule: Any, expected: list[float]) -> None:
    settings = OptimizerSection(lr=1.0, warmup_steps=4, schedule=schedule, final_lr_share=0.1)
    assert [learning_rate(settings, step, 12) for step in (1, 4, 8, 12)] == pytest.approx(expected)


def test_a_cosine_is_slow_at_both_ends() -> None:
    settings = OptimizerSection(lr=1.0, schedule="cosine")
    assert learning_rate(settings, 1, 10) > 0.97
    assert learning_rate(settings, 9, 10) < 0.03


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, F64)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"num_hidden_layers": 3}, "are of two models: model.layers.2"),
        ({"hidden_size": 48}, "cannot be loaded: "),
    ],
)
def test_weights_that_are_not_all_there_are_never_drawn_at_random(
    model_folder: Path, tmp_path: Path, values: Any, why: str
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "m"))
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | values))
    with pytest.raises(ConfigError, match=why):
        load_model(folder, F64)
