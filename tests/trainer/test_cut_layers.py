"""Which layers ranks cut, which models are refused, and how rows come back into the ranks' order. Steps over ranks: `test_mesh`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from scavenger.config import TrainerSection
from scavenger.errors import ConfigError
from trainer.model import tensor_parallel
from trainer.model.mesh import Division, check_nodes, check_slices, divide
from trainer.model.slice_rows import Block, crossing, due, held

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def model_of(**config: Any) -> Any:
    made = AutoConfig.for_model(**(SHAPE | config))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made)


def refused(model: Any, tensor: int) -> str:
    with pytest.raises(ConfigError) as caught:
        tensor_parallel.check_model(model, tensor)
    return str(caught.value)


# ---------------------------------------------------------------- divisions


@pytest.mark.parametrize(
    ("ranks", "keys", "told"),
    [
        (
            8,
            {"tensor_parallel": 3},
            "trainer.tensor_parallel = 3 does not divide the 8 rank(s) of each replica",
        ),
        (8, {"replicas": 4, "tensor_parallel": 4}, "does not divide the 2 rank(s) of each replica"),
        (
            8,
            {"tensor_parallel": 4, "context_parallel": 4},
            "trainer.context_parallel = 4 does not divide the 2 groups of 4 ranks (trainer.tensor_parallel)",
        ),
    ],
)
def test_ranks_that_cannot_be_divided_so_are_refused(ranks: int, keys: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        divide(ranks, TrainerSection.model_validate(keys))
    assert told in str(caught.value)
    assert "remedy: set it to 1" in str(caught.value)


def test_a_division_says_who_cuts_what() -> None:
    division = divide(32, TrainerSection(replicas=2, tensor_parallel=2, context_parallel=4))
    assert division == Division(32, 2, 4, 2)
    assert (division.shards, division.together, division.data_parallel) == (16, 8, 4)
    assert (
        str(division)
        == "16 ranks share the model, 2 replicas of it, 2 ranks cut each layer, 8 ranks share each sample"
    )


def test_a_tensor_group_lies_on_one_node() -> None:
    check_nodes(8, 4)
    with pytest.raises(ConfigError, match="does not divide the 6 rank") as caught:
        check_nodes(6, 4)
    assert "set it to 1, 2, 3 or 6" in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((6, 2, 16), "the model has 6 attention heads, which 4 ranks"),
        ((8, 2, 16), "the model has 2 key-value heads, which 4 ranks"),
        ((8, 4, 151_938), "the model has 151,938 entries in its vocabulary, which 4 ranks"),
    ],
)
def test_heads_and_a_vocabulary_that_ranks_cannot_share_are_refused(
    counts: tuple[int, int, int], told: str
) -> None:
    check_slices(8, 4, 16, 4)
    with pytest.raises(ConfigError) as caught:
        check_slices(*counts, 4)
    assert told in str(caught.value)
    assert "set it to 1 or 2" in str(caught.value)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "phi3"])
def test_a_model_with_a_plan_is_cut_by_it(kind: str) -> None:
    model = model_of(model_type=kind, **({"pad_token_id": 0} if kind == "phi3" else {}))
    tensor_parallel.check_model(model, 2)
    cuts = tensor_parallel.plan_of(model, 2)
    assert sum(bool(one.sides) for one in cuts.values()) >= 2 + 4 * SHAPE["num_hidden_layers"]
    assert cuts["model.layers.1.self_attn.o_proj"].sides == {"weight": 1}
    assert cuts["model.embed_tokens"].sides == cuts["lm_head"].sides == {"weight": 0}
    assert not cuts["model.norm"].sides


def test_experts_are_dealt_out_whole_and_their_router_stays() -> None:
    model = model_of(
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        decoder_sparse_step=1,
    )
    cuts = tensor_parallel.plan_of(model, 2)
    experts = cuts["model.layers.0.mlp.experts"]
    assert experts.sides == {"gate_up_proj": 0, "down_proj": 0}
    assert not cuts["model.layers.0.mlp.gate"].sides
    assert "gate_up_proj has 4, no multiple of 3, to cut" in str(
        _raised(lambda: tensor_parallel.plan_of(_with_heads(model), 3))
    )


def _with_heads(model: Any) -> Any:
    """Nothing but the experts stands in the way of three ranks."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and not name.endswith("experts"):
            module.weight = torch.nn.Parameter(torch.empty(36, 36, device="meta"))
    return model


def _raised(call: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
            "transformers has no plan to cut the layers of GptOssForCausalLM",
        ),
        (
            {
                "model_type": "deepseek_v2",
                "kv_lora_rank": 8,
                "q_lora_rank": None,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "first_k_dense_replace": 2,
            },
            "is to be cut by 'mla_kv_a_proj', which is not known here",
        ),
        (
            {"model_type": "qwen3", "intermediate_size": 35},
            "gate_proj.weight has 35, no multiple of 2, to cut",
        ),
        ({"model_type": "qwen3", "num_key_value_heads": 1}, "1 key-value heads, which 2 ranks"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(config: dict[str, Any], said: str) -> None:
    found = refused(model_of(**config), 2)
    assert said in found
    assert "remedy: set" in found


def test_a_parameter_beside_cut_layers_is_refused() -> None:
    """As attention's sinks are: of all heads, where each rank has some."""
    model = model_of(model_type="qwen3")
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.empty(4, device="meta"))
    assert "self_attn.sinks is a parameter beside layers that are cut" in refused(model, 2)


# ---------------------------------------------------------------- rows in the ranks' order

RANKS = [(2, 2), (4, 2), (4, 4), (6, 2), (8, 4)]
SHAPES: list[tuple[tuple[int, ...], int | None]] = [
    ((16, 6), 0),
    ((20, 6), 0),
    ((8, 4, 6), 0),
    ((12,), 0),
    ((7, 8), 1),
    ((3, 16), 1),
    ((5, 3), None),
    ((9,), None),
    ((), None),
]


@pytest.mark.parametrize(("ranks", "tensor"), RANKS)
@pytest.mark.parametrize(("shape", "side"), SHAPES)
def test_every_rank_gets_its_rows_once(
    shape: tuple[int, ...], side: int | None, ranks: int, tensor: int
) -> None:
    whole = torch.arange(1.0, 1.0 + max(1, int(torch.tensor(shape).prod()))).reshape(
        shape[0] if shape else 1, -1
    )

    def part(block: Block) -> Tensor:
        return whole[block.top : block.bottom, block.left : block.right]

    everything: list[Tensor] = []
    for target in range(ranks):
        wanted = due(shape, target, ranks)
        found = torch.zeros(wanted.shape)
        for source in range(ranks):
            block = crossing(shape, side, source, target, ranks, tensor)
            if block.values:
                has = part(held(shape, side, source, ranks, tensor))
                found[block.of(wanted)] += has[block.of(held(shape, side, source, ranks, tensor))]
        assert torch.equal(found, part(wanted)), "what came twice would count twice"
        everything.append(found)
    assert torch.equal(torch.cat(everything), whole)


@pytest.mark.parametrize(("ranks", "tensor"), RANKS)
def test_slices_of_a_side_are_all_of_it(ranks: int, tensor: int) -> None:
    for shape, side in SHAPES:
        if side is None:
            continue
        values = [held(shape, side, rank, ranks, tensor).values for rank in range(ranks)]
        assert sum(values) == int(torch.tensor(shape).prod()), shape


def test_what_is_whole_on_each_rank_of_a_group_is_given_by_one() -> None:
    given = [
        [crossing((8, 2), None, source, target, 4, 2).values for source in range(4)] for target in range(4)
    ]
    assert all(sum(amount > 0 for amount in row) == 1 for row in given)
