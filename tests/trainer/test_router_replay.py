"""Router replay in training: rows carry the experts that generated them, and the learner repeats them. One process, small models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.engines import routing
from scavenger import config as configs
from scavenger.config import AlgorithmSection, OptimizerSection, TrainerSection
from scavenger.errors import ConfigError, EngineError
from scavenger.protocol.messages import unpack_tokens
from tests.trainer.rows import make_group
from tests.trainer.test_local import metrics, run_local, write_run
from trainer.algorithms.rows import resolve
from trainer.data.batching import Micro, TrainRow, filler
from trainer.data.collate import packed, padded
from trainer.model.learner import Learner
from trainer.model.replay import Replay, routing_nbytes
from trainer.prepare import check

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
REPLAY = "[algorithm]\nrouter_replay = true\n"


@pytest.fixture(scope="module")
def experts_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' model with experts in its layers."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    shutil.copytree(model_folder, folder)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | EXPERTS)
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    save_file(
        {name: value.detach().contiguous() for name, value in model.named_parameters()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def learner_of(folder: Path, mesh: DeviceMesh, *, router_replay: bool = True, **section: Any) -> Learner:
    return Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(), 8),
        optimizer=OptimizerSection(lr=1e-4),
        temperature=1.0,
        deterministic=False,
        trainer=TrainerSection(**section),
        router_replay=router_replay,
    )


def with_experts(row: TrainRow, model: Any, shift: int = 0) -> TrainRow:
    """The row with the experts that transformers chooses for it, or `shift` further ones."""
    tokens = unpack_tokens(row.prompt + row.completion)
    found: list[Any] = []
    hooks = [
        router.register_forward_hook(lambda _m, _i, output: found.append(output[2]))
        for router in routing.routers(model)
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    chosen = (torch.stack(found, dim=1)[len(row.prompt) // 4 - 1 : -1] + shift) % 4
    return changed(row, routing=b"".join(routing.pack(chosen, 4)))


def logprobs_of(learner: Learner, rows: tuple[TrainRow, ...], *, packing: bool) -> dict[int, Any]:
    micro = Micro(rows, 0 if packing else max(row.tokens for row in rows))
    return {
        sample: torch.frombuffer(bytearray(data), dtype=torch.float64)
        for sample, data in learner.proximal(micro).items()
    }


@pytest.mark.parametrize("packing", [True, False])
def test_a_learner_trains_the_recorded_experts(experts_folder: Path, mesh: DeviceMesh, packing: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(experts_folder, dtype=torch.float32)
    rows = make_group(1)
    own = tuple(with_experts(row, model) for row in rows)
    other = tuple(with_experts(row, model, shift=1) for row in rows)
    plain = logprobs_of(
        learner_of(experts_folder, mesh, router_replay=False, packing=packing), rows, packing=packing
    )
    learner = learner_of(experts_folder, mesh, packing=packing)
    same = logprobs_of(learner, own, packing=packing)
    forced = logprobs_of(learner, other, packing=packing)
    replay = Replay(model)
    for row in other:
        assert torch.allclose(same[row.sample_id], plain[row.sample_id], atol=1e-5)
        tokens = unpack_tokens(row.prompt + row.completion)
        first = len(row.prompt) // 4 - 1
        at = torch.arange(first, len(tokens) - 1)
        held = torch.frombuffer(bytearray(row.routing), dtype=torch.uint8).view(len(at), -1)
        replay.use(held, at, len(tokens))
        exact = model(torch.tensor([tokens])).logits[0, first:-1].log_softmax(-1)
        exact = exact.gather(1, torch.tensor(tokens[first + 1 :])[:, None])[:, 0].double()
        assert torch.allclose(forced[row.sample_id], exact, atol=1e-5)
        assert not torch.allclose(forced[row.sample_id], plain[row.sample_id], atol=1e-3)
    if not packing:
        return
    # The backward pass computes layers again, by the same experts.
    grads = []
    for recompute in (False, True):
        one = learner_of(experts_folder, mesh, activation_checkpointing=recompute)
        one.train(Micro(other, 0))
        grads.append({name: p.grad.full_tensor().clone() for name, p in one.model.named_parameters()})
    for name, gradient in grads[0].items():
        assert torch.allclose(gradient, grads[1][name], atol=1e-6), name
    assert any("gate" in name and float(gradient.abs().sum()) for name, gradient in grads[0].items())


def test_rows_without_their_experts_are_refused_and_fillers_are_not(
    experts_folder: Path, mesh: DeviceMesh
) -> None:
    learner = learner_of(experts_folder, mesh)
    with pytest.raises(EngineError, match="came with no routing"):
        learner.train(Micro(make_group(1), 0))
    learner.train(filler(Micro(make_group(1), 0)))


def test_routing_lies_beside_the_tokens_in_both_layouts() -> None:
    rows = tuple(changed(row, routing=bytes(range(len(row.completion) // 4)) * 1) for row in make_group(1))
    for batch in (
        packed(Micro(rows, 0), torch.float32),
        padded(Micro(rows, max(row.tokens for row in rows)), torch.float32),
    ):
        assert batch.routing is not None
        assert batch.routing[:, 0].tolist() == [i for row in rows for i in range(len(row.completion) // 4)]
        assert replace(batch, routing=None).at.tolist() == batch.at.tolist()


def test_a_model_without_experts_or_with_too_long_groups_is_refused_at_the_start(
    experts_folder: Path, model_folder: Path, tmp_path: Path
) -> None:
    fine = configs.read_run(write_run(tmp_path, experts_folder, steps=1, out="a", more=REPLAY))
    assert routing_nbytes(fine) == 4
    dense = configs.read_run(write_run(tmp_path, model_folder, steps=1, out="b", more=REPLAY))
    with pytest.raises(ConfigError, match="'qwen3' has no experts whose choice can be repeated"):
        routing_nbytes(dense)
    sampling = fine.sampling.model_copy(update={"max_tokens": 2_000_000})
    with pytest.raises(ConfigError, match=r"a group of 4 completions of 2,000,000 tokens has 122 MiB"):
        routing_nbytes(fine.model_copy(update={"sampling": sampling}))


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ("[trainer]\ncontext_parallel = 2\n", "trainer.context_parallel = 1"),
        ('[engine]\nname = "vllm"\n', "engine.eager = true"),
        (
            '[engine]\nname = "vllm"\neager = true\n[engine.vllm]\npipeline_parallel_size = 2\n',
            "engine.vllm.pipeline_parallel_size",
        ),
        ('[engine]\nname = "vllm"\neager = true\nspeculation = "group"\n', "engine.speculation"),
    ],
)
def test_what_engines_would_not_tell_is_refused_by_the_configuration(
    experts_folder: Path, tmp_path: Path, more: str, cause: str
) -> None:
    path = write_run(tmp_path, experts_folder, steps=1, out="c", more=more + REPLAY)
    path.write_text(path.read_text().replace("deterministic = true\n", "").replace('"float64"', '"float32"'))
    with pytest.raises(ConfigError) as refused:
        configs.read_run(path)
    assert cause in str(refused.value)


def test_a_run_in_one_process_replays_its_engine_s_experts(experts_folder: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, experts_folder, steps=2, out="whole", more=REPLAY)
    path.write_text(path.read_text().replace("deterministic = true\n", "").replace('"float64"', '"float32"'))
    done = run_local(path)
    assert done.returncode == 0, done.stderr
    trained = [entry for entry in metrics(tmp_path, "whole") if entry["kind"] == "train"]
    assert [entry["step"] for entry in trained] == [1, 2]
    assert all(entry["mismatch_k3"] < 1e-9 for entry in trained)


def test_the_check_refuses_exact_sums_of_experts_and_tells_what_replay_costs(
    experts_folder: Path, tmp_path: Path
) -> None:
    path = write_run(tmp_path, experts_folder, steps=1, out="d", more=REPLAY)
    found = {one.what: one for one in check.check(path, check.RequestedGpus(1, 0, 0.0))}
    assert "computes in float64, which transformers' experts do not" in found["model"].problem
    path.write_text(path.read_text().replace("deterministic = true\n", "").replace('"float64"', '"float32"'))
    found = {one.what: one for one in check.check(path, check.RequestedGpus(1, 0, 0.0))}
    assert not found["model"].problem
    assert found["algorithm"].note == "grpo, each token with 4 bytes that say its experts"
