"""Mixtures of experts in vLLM: from the names that a run publishes to vLLM's fused experts, checked expert by expert.

The engine is vLLM itself, on this CPU; models are made in place. What is not seen without GPUs: the layouts of its GPU kernels, experts
that are dealt out to ranks (its CPU kernel does not compute those).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollout.engines import checksum
from rollout.engines.base import EngineHost
from rollout.engines.vllm import names
from scavenger.errors import EngineError, WeightsDiffer

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
kinds = pytest.importorskip("tests.rollout.kinds")
from rollout.engines.vllm import setup  # noqa: E402  needs torch, as all that follows
from tests.rollout import planted_loads  # noqa: E402
from tests.rollout.test_engine_contract import GREEDY, finish, request  # noqa: E402
from trainer.prepare import engines  # noqa: E402

if TYPE_CHECKING:
    from scavenger.weights.manifest import TensorView

COMMON = {"head_dim": 32, "hidden_size": 64, "num_experts_per_tok": 2, "vocab_size": 100}
QWEN = {
    "num_experts": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT_OSS = {
    "num_local_experts": 4,
    "intermediate_size": 64,
    "tie_word_embeddings": False,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
KINDS = {"qwen3_moe": QWEN, "gpt_oss": GPT_OSS}
QUIET = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


def text_of(kind: str) -> str:
    return str(models.config_text(kind, **COMMON | KINDS[kind]))


def model_of(kind: str, seed: int = 0) -> Any:
    """Experts, biases and sinks that matter: small ones would hide that they are wrong."""
    model = models.plain_model(text_of(kind), seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            parameter.mul_(6.0)
        elif kind == "gpt_oss" and ("bias" in name or "sinks" in name):
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def views_of(model: Any) -> list[TensorView]:
    found: list[TensorView] = models.views(model)
    return found


def likeliest(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


# ---------------------------------------------------------------- names


def test_every_published_name_of_an_expert_is_one_of_vllm_s() -> None:
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    inner = "model.layers.0.mlp.experts.routed_experts"
    theirs = [f"{inner}.{part}" for part in ("w13_weight", "w2_weight", "w13_bias", "w2_bias")]
    theirs += ["model.layers.0.attn.qkv_proj.weight", "model.embedding.weight"]
    ours = [
        f"model.layers.0.mlp.experts.{part}"
        for part in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    ]
    attention = [f"model.layers.0.self_attn.{part}.weight" for part in packed["qkv_proj"]]

    def rename(name: str) -> str:
        return name.replace(".self_attn.", ".attn.").replace(".embed_tokens.", ".embedding.")

    published = [*ours, *attention, "model.embed_tokens.weight"]
    found = names.published_names(theirs, published, rename, packed)
    assert found == dict(
        zip(
            theirs,
            [*ours, "model.layers.0.self_attn.qkv_proj.weight", "model.embed_tokens.weight"],
            strict=True,
        )
    )
    assert checksum.sources(found[theirs[4]], published, packed) == tuple(attention)


def test_experts_are_told_apart_and_each_rank_may_have_some() -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 3, 2)
    told = {names.expert("e", i): checksum.checksum(row) for i, row in enumerate(rows)}
    ranks = [{name: told[name] for name in chosen} for chosen in (["e[0]", "e[2]"], ["e[1]", "e[3]"])]
    assert checksum.faults(told, ranks, {}, {}, {}) == []
    swapped = [ranks[0] | {"e[2]": told["e[0]"], "e[0]": told["e[2]"]}, ranks[1]]
    assert checksum.faults(told, swapped, {}, {}, {}) == [
        "e[0] does not hold e[0]",
        "e[2] does not hold e[2]",
    ]
    assert checksum.faults(told, [ranks[0], {"e[1]": told["e[1]"]}], {}, {}, {}) == [
        "e[3] is held by no parameter"
    ]


def test_a_bias_that_ranks_add_up_lies_on_one_of_them() -> None:
    name = "l.mlp.experts.down_proj_bias[0]"
    bias = torch.randn(6)
    told = {name: checksum.checksum(bias)}
    one, other = {name: told[name]}, {name: checksum.checksum(torch.zeros(6))}
    assert checksum.faults(told, [one, other], {}, {}, {}) == []
    assert checksum.faults(told, [one, one], {}, {}, {}) == [f"{name} does not hold {name}"]


# ---------------------------------------------------------------- vLLM itself


#: The second one takes a minute: it is among the long tests.
LONG = {"qwen3_moe": QUIET, "gpt_oss": [*QUIET, pytest.mark.long]}


@pytest.fixture(params=[pytest.param(kind, marks=LONG[kind]) for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_experts_come_in_as_from_files_and_a_swapped_or_missing_one_is_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout.engines.vllm import engine as vllm

    monkeypatch.setattr(setup, "EXTENSION", planted_loads.EXTENSION)
    spec = models.spec(text_of(kind), dtype="float32", name="vllm")
    first, second = model_of(kind, 0), model_of(kind, 1)

    async def main() -> None:
        engine = await vllm.build(spec, EngineHost("run"))
        try:
            await engine.load(1, views_of(first))
            await _as_transformers(engine, first)
            for fault, tensor in (("swapped", "[0]"), ("missing", "[3]"), ("withheld", "[0]")):
                await engine._core.rpc("plant", fault)
                with pytest.raises(WeightsDiffer, match=r"layers\.1\.mlp\.experts\.down_proj\[") as found:
                    await engine.load(2, views_of(second))
                assert tensor in str(found.value)
            await engine._core.rpc("plant", "")
            await engine.load(3, views_of(second))
            await _as_transformers(engine, second)
            (ours,) = await engine._core.rpc("raw_hashes")
        finally:
            await engine.close()
        assert ours == await _loaded_by_vllm(kind, second, tmp_path)

    asyncio.run(main())


async def _as_transformers(engine: Any, model: Any) -> None:
    found = await finish(engine, *(request(i, GREEDY) for i in range(3)))
    for handle, delta in found.items():
        prompt = request(handle, GREEDY).prompt
        assert delta.token_ids == likeliest(model, prompt, len(delta.token_ids))
        logits = model(torch.tensor([prompt + delta.token_ids])).logits[0, len(prompt) - 1 : -1]
        exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(delta.token_ids)[:, None])[:, 0]
        assert delta.raw_logprobs == pytest.approx(exact.tolist(), abs=1e-4)


async def _loaded_by_vllm(kind: str, model: Any, folder: Path) -> dict[str, str]:
    """What vLLM itself makes of the same weights as files, where each expert has tensors of its own."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model.save_pretrained(folder)
    spec = models.spec(text_of(kind), dtype="float32", name="vllm")
    values, _, config = setup.checked_config(spec)
    (folder / "config.json").write_text(json.dumps(values))
    mine = setup.prepare_environment(gpu=False)
    chosen = setup.arguments(spec, EngineHost("run"), mine, config, gpu=False)
    chosen |= {"model": str(folder), "load_format": "safetensors"}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**chosen))
    try:
        (found,) = await llm.collective_rpc("raw_hashes", 60)
        return dict(found)
    finally:
        llm.shutdown()


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", list(KINDS), indirect=True)
def test_two_ranks_hold_slices_of_every_expert(kind: str) -> None:
    from rollout.engines.vllm import engine as vllm

    model = model_of(kind)

    async def main() -> None:
        spec = models.spec(text_of(kind), dtype="float32", name="vllm")
        engine = await vllm.build(spec, EngineHost("run", 2))
        try:
            await engine.load(1, views_of(model))
            await _as_transformers(engine, model)
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_mixture_whose_names_are_not_known_is_refused_before_any_engine() -> None:
    text = models.config_text("mixtral", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(EngineError, match="mixtral"):
        setup.checked_config(models.spec(text, dtype="float32", name="vllm"))
    with pytest.raises(EngineError, match="qwen3_moe or gpt_oss"):
        engines.check_vllm_model(text)  # as `scavenger init --check` asks
    engines.check_vllm_model(text_of("gpt_oss"))
