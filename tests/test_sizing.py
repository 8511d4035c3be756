"""The model of memory against numbers worked out by hand, for public models; and what it proposes where a run does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scavenger.simulate import presets
from scavenger.simulate.plan import TrainingSettings, parse_model
from scavenger.simulate.trainer_model import TrainerSpec, state_bytes_per_gpu
from scavenger.sizing import engine, fit, phases, training
from scavenger.sizing.shape import ModelShape, of_config
from scavenger.sizing.training import GB, TrainJob
from tests.public_models import CONFIGS, MODELS

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def job(shape: ModelShape, **more: Any) -> TrainJob:
    plain = TrainJob(
        8, 80.0, 16384, True, shape.parameters, False, True, 0.9, 1, longest=9216, head_chunk=1024
    )
    return replace(plain, **more)


def lora(shape: ModelShape, rank: int = 16, **more: Any) -> TrainJob:
    trained = shape.adapters(rank, ALL)
    return job(shape, lora_rank=rank, targets=ALL, trained=trained, **more)


@pytest.mark.parametrize(
    ("name", "parameters", "token_kb", "states_gb"),
    [
        # parameters: of the safetensors files on huggingface.co, tied ones once; a token's keys and values: layers x KV heads x 128 x 2 x 2
        # bytes; states: 16 bytes a parameter over 8 ranks
        ("0.6B", 596_049_920, 28 * 8 * 512, 1.192),
        ("1.7B", 1_720_574_976, 28 * 8 * 512, 3.441),
        ("4B", 4_022_468_096, 36 * 8 * 512, 8.045),
        ("8B", 8_190_735_360, 36 * 8 * 512, 16.381),
        ("14B", 14_768_307_200, 40 * 8 * 512, 29.537),
        ("32B", 32_762_123_264, 64 * 8 * 512, 65.524),
        ("30B-A3B", 30_532_122_624, 48 * 4 * 512, 61.064),
    ],
)
def test_public_models_have_the_sizes_that_are_known_of_them(
    name: str, parameters: int, token_kb: int, states_gb: float
) -> None:
    shape = MODELS[name]
    assert shape.parameters == parameters
    assert engine.token_nbytes(shape, 1) == token_kb
    assert training.states(shape, job(shape)).nbytes / GB == pytest.approx(states_gb, abs=0.001)


def test_a_layer_of_qwen3_8b_keeps_what_its_values_add_up_to() -> None:
    """By hand, in bfloat16 with flash attention, bytes a token: two norms of 4,096 (float32 input 4, normalised 2, result 2), norms of
    4,096 queries and 1,024 keys (4 and 2), rotated queries and the result of attention (2 x 2 x 4,096), rotated keys and values
    (2 x 2 x 1,024), 4 bytes for each of 32 heads, and gate, its activation, up and their product (4 x 2 x 12,288)."""
    eight = MODELS["8B"]
    by_hand = 2 * 8 * 4096 + 6 * (4096 + 1024) + 4 * 4096 + 4 * 1024 + 4 * 32 + 8 * 12288
    assert by_hand == 215_168
    whole = job(eight, checkpointing=False)
    assert training.kept_nbytes(eight, whole, sparse=False) == by_hand
    backward = max((one for one in training.moments(eight, whole)), key=lambda one: one.activations)
    assert backward.activations > 36 * by_hand * 16384
    again = max(one.activations for one in training.moments(eight, job(eight)))
    assert again == pytest.approx((36 * 2 * 4096 + by_hand) * 16384, rel=0.2), (
        "a layer's input, and one layer whole"
    )


def test_experts_are_gathered_whole_and_tokens_keep_those_that_they_go_to() -> None:
    """Qwen3-30B-A3B: a layer has 128 experts of 3 x 2,048 x 768 and is 623 M weights, of which 8 experts take a token."""
    sparse = MODELS["30B-A3B"]
    attention = 2 * 2048 * (32 + 4) * 128 + 2 * 2048 + 2 * 128
    assert sparse.layer == attention + 128 * 3 * 2048 * 768 + 128 * 2048 == 623_120_640
    attention_kept = 8 * 2048 + 6 * (4096 + 512) + 4 * 4096 + 4 * 512 + 4 * 32
    experts_kept = 6 * 2048 + 2 * 2048 * 1 + 2 * 4 * 128 + 2 * 8 * (2 * 2048 + 4 * 768) - 2 * 2048
    kept = training.kept_nbytes(sparse, job(sparse), sparse=True)
    assert kept == pytest.approx(attention_kept + experts_kept, rel=0.03)
    gathered = max(one.gathered for one in training.moments(sparse, job(sparse)))
    assert gathered == 2 * sparse.root + 4 * sparse.layer, (
        "bfloat16: what is outside of layers, this layer and the next"
    )


def test_adapters_have_the_weights_of_both_their_sides() -> None:
    """Qwen3-8B, rank 16 beside all seven projections: 16 x (8,192 + 5,120 + 5,120 + 8,192 + 3 x 16,384) in each of 36 layers."""
    eight = MODELS["8B"]
    assert eight.adapters(16, ALL) == 36 * 16 * (8192 + 5120 + 5120 + 8192 + 3 * 16384) == 43_646_976
    assert eight.adapters(16, ("q_proj", "v_proj")) == 36 * 16 * (8192 + 5120)
    sparse = MODELS["30B-A3B"]
    assert sparse.adapters(16, ALL) == sparse.adapters(16, ALL[:4]), "experts are no linear layers"
    states = training.states(eight, lora(eight))
    assert states.weights == (8_190_735_360 + 43_646_976) * 4 // 8
    assert (states.optimizer, states.gradients) == (43_646_976, 43_646_976 // 2)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["0.6B", "8B", "30B-A3B"])
def test_an_engine_s_weights_are_cut_as_tensor_parallelism_cuts_them(name: str, gpus: int) -> None:
    """Against transformers' own plan of the model: every tensor's share, the vocabulary's two matrices cut as vLLM does."""
    transformers = pytest.importorskip("transformers", reason="the [trainer] extra")
    torch = pytest.importorskip("torch", reason="the [trainer] extra")
    known = dict(CONFIGS[name])
    config = transformers.AutoConfig.for_model(known.pop("model_type"), **known)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plan = [pattern.replace("*", "") for pattern in config.base_model_tp_plan]
    total = 0
    for tensor, value in model.named_parameters():
        flat = "".join(
            part for part in tensor.removesuffix(".weight").removeprefix("model.") if not part.isdigit()
        )
        planned = (
            any(flat == pattern for pattern in plan) and "norm" not in tensor and "mlp.gate." not in tensor
        )
        cut = planned or "embed_tokens" in tensor or "lm_head" in tensor
        copies = max(1, gpus // config.num_key_value_heads) if "k_proj" in tensor or "v_proj" in tensor else 1
        total += value.nbytes * copies // gpus if cut else value.nbytes
    assert engine.weight_nbytes(MODELS[name], gpus) == pytest.approx(total, rel=0.01)


def test_completions_of_32k_take_more_than_those_of_1k() -> None:
    """What was told of both was 20.4 GB: the longest sample that can come is a micro-batch of its own."""
    eight = MODELS["8B"]
    short, long = (
        fit.need(eight, job(eight, longest=512 + completion, micro_tokens=8192)).step
        for completion in (1024, 32768)
    )
    assert long > 2 * short
    tokens = (512 + 32768) / 8192
    kept = training.kept_nbytes(eight, job(eight), sparse=False) + 36 * 2 * 4096
    assert (long - short) * GB == pytest.approx(kept * 8192 * (tokens - 1), rel=0.25)
    again = fit.need(eight, job(eight, longest=33280, micro_tokens=8192, head_chunk=0)).step
    assert again > long
    assert again > 2 * 2 * 33280 * 151936 / GB, "a whole matrix of logits, and its gradient"


def test_a_rank_of_the_trainer_and_an_engine_never_count_at_once() -> None:
    eight = MODELS["8B"]
    rows = phases.table(eight, job(eight))
    states = training.states(eight, job(eight)).nbytes
    assert phases.device_nbytes(rows, "generate") == int(0.9 * 80 * GB), "states are away"
    for phase in ("to_training", "to_generating"):
        assert phases.device_nbytes(rows, phase) == states
    for phase in phases.TRAINING:
        assert not any(row.component == "engine" and row.device for row in rows if row.phase == phase)
    kept = phases.table(eight, job(eight, engine_share=0.5))
    assert phases.device_nbytes(kept, "generate") == int(0.5 * 80 * GB) + states, "both fit"
    assert phases.device_nbytes(rows, "load") == states - training.states(eight, job(eight)).gradients


def test_a_node_s_host_holds_states_versions_and_reserved_engines() -> None:
    """Qwen3-32B on 16 GPUs of two nodes, two GPUs an engine. By hand: 8 ranks of 32.8 GB of states that leave, 3.25 versions of 65.5 GB
    over 16 ranks, a checkpoint of 12 bytes a parameter over 16, 4 GB a process, and 4 engines, asleep, of 3.25 versions and 7.7 GiB."""
    large = MODELS["32B"]
    wanted = job(large, ranks=16, per_node=8, engine_gpus=2, reserved_gpus=2)
    version = 2 * large.parameters / GB
    engines = 4 * (3.25 * version + (1536 + 2 * 3072) * 2**20 / GB)
    by_hand = 8 * (16 * 32.762 / 16 + 3.25 * version / 16 + 12 * 32.762 / 16 + 4) + engines
    assert phases.node_nbytes(large, wanted) / GB == pytest.approx(by_hand, rel=0.01)
    cause, remedy = fit.host_problem(large, wanted, 1000.0)
    assert (
        f"each training node needs {by_hand:,.0f} GB of host memory, and train.sbatch asks for 1,000 GB"
        in cause
    )
    assert "fewer or wider reserved engines: reserved.gpus_per_engine = 8, reserved.workers = 2" in remedy
    assert fit.host_problem(large, wanted, 2000.0) == fit.host_problem(large, wanted, 0.0) == ("", "")
    one = replace(wanted, reserved_gpus=8)
    assert phases.node_nbytes(large, one) < 0.6 * phases.node_nbytes(large, wanted)
    few = replace(wanted, reserved_workers=2)
    assert phases.reserved_on_node(few) == 1, "one on each node"


def test_a_reference_engine_is_counted_by_what_it_takes() -> None:
    """0.6B, 64 samples of 9,216 tokens in slots of 28 layers x 2 x 8 heads x 128 x 2 bytes: more than an 80 GB GPU beside nothing."""
    small = MODELS["0.6B"]
    taken = engine.reference_nbytes(small, 64, 9216, 2)
    assert taken == 2 * small.parameters + 64 * 9216 * 28 * 2 * 8 * 128 * 2
    asked = job(small, ranks=1, engine="reference", engine_share=taken / (80 * GB))
    rows = phases.table(small, asked)
    assert phases.device_nbytes(rows, "generate") >= taken - 1
    assert fit.problem(small, asked) == ("", "")
    for changed in ({"engine_share": 3 * taken / (80 * GB)}, {"offload": "never", "ranks": 1}):
        cause, remedy = fit.problem(small, replace(asked, **({"engine_share": 0.9} | changed)))
        assert "a reference engine takes" in cause
        assert "lower engine.max_batch" in remedy


def test_a_soft_cap_holds_one_more_matrix_of_a_chunk_s_logits() -> None:
    """`trainer.model.head`: logits, their gradient, and the slope of the tanh."""
    plain = MODELS["8B"]
    of = of_config({"hidden_size": 8, "num_attention_heads": 1, "final_logit_softcapping": 30.0})
    assert of.capped
    more = training._head_nbytes(replace(plain, capped=True), job(plain)) - training._head_nbytes(
        plain, job(plain)
    )
    assert more == 4 * 1024 * plain.vocabulary


def test_published_versions_take_what_weights_dtype_says() -> None:
    eight = MODELS["8B"]
    wide = phases.node_nbytes(eight, job(eight, published=4)) - phases.node_nbytes(eight, job(eight))
    served, engines = 3.25 * 2 * eight.parameters, 8 * 3.25 * 2 * eight.parameters
    assert wide == pytest.approx(served + engines, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, {}),
        (
            {"checkpointing": False, "micro_tokens": 9216, "ranks": 16},
            {"trainer.activation_checkpointing": "true"},
        ),
        ({"micro_tokens": 262144}, {"trainer.micro_batch_tokens"}),
        ({"ranks": 1}, {"GPUs"}),
        ({"ranks": 2, "longest": 65536}, {"GPUs"}),
    ],
)
def test_what_is_proposed_fits(changes: dict[str, Any], keys: Any) -> None:
    eight = MODELS["8B"]
    asked = job(eight, **changes)
    found = fit.propose(eight, asked)
    assert set(found) >= set(keys)
    assert bool(found) == (not fit.trains(eight, asked))
    tried = replace(
        asked,
        checkpointing=asked.checkpointing or "trainer.activation_checkpointing" in found,
        micro_tokens=int(found.get("trainer.micro_batch_tokens", asked.micro_tokens)),
        head_chunk=int(found.get("trainer.head_chunk_tokens", asked.head_chunk)),
        ranks=int(found.get("GPUs", asked.ranks)),
    )
    assert fit.trains(eight, tried)


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    eight = MODELS["8B"]
    tokens = fit.largest_micro(eight, job(eight))
    assert tokens % 1024 == 0
    assert fit.trains(eight, job(eight, micro_tokens=tokens))
    assert not fit.trains(eight, job(eight, micro_tokens=tokens + 1024))
    assert fit.largest_micro(eight, job(eight, ranks=1)) == 0


def test_a_refusal_names_settings_that_fit() -> None:
    eight = MODELS["8B"]
    cause, remedy = fit.problem(eight, job(eight, micro_tokens=262144))
    assert "a micro-batch does not fit" in cause
    assert f"this fits: trainer.micro_batch_tokens = {fit.largest_micro(eight, job(eight))}" in remedy
    plain = fit.problem(eight, job(eight, checkpointing=False, micro_tokens=16384, gpu_gb=48.0))
    assert "this fits: trainer.activation_checkpointing = true" in plain[1]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_local_experts": 32, "experts_per_token": 4, "intermediate_size": 2880}, (32, 4, 2880, 0, 24)),
        (
            {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
            | {"n_shared_experts": 2, "first_k_dense_replace": 1},
            (64, 6, 1408, 2816, 23),
        ),
        (
            {"num_experts": 60, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 2},
            (60, 0, 11008, 5632, 12),
        ),
        ({}, (0, 0, 0, 0, 0)),
    ],
    ids=["gpt-oss", "deepseek", "every other layer", "dense"],
)
def test_experts_are_found_under_the_names_that_configurations_use(
    config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    base = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 1000}
    found = of_config(base | {"intermediate_size": 11008} | config)
    given = (found.experts, found.chosen, found.expert_inner, found.shared_inner, found.sparse_layers)
    assert given == expected


def test_the_simulator_counts_states_and_keys_as_the_trainer_and_its_engines_do() -> None:
    for name in ("8B", "32B"):
        model = parse_model(CONFIGS[name], name, Path("config.json"))
        spec = TrainerSpec(model, presets.H100, 8, 0.4, 1e9, 1e9)
        states = training.states(MODELS[name], job(MODELS[name])).nbytes
        assert state_bytes_per_gpu(spec) == pytest.approx(states, rel=1e-3), "it leaves norms out"
        assert model.kv_bytes_per_token == engine.token_nbytes(MODELS[name], 1)
        for share in (0.3, 0.9):
            settings = TrainingSettings("auto", share)
            capacity = presets.H100.memory_bytes
            live = training.offloads("auto", resident=states, engine=share * capacity, capacity=capacity)
            assert settings.offloads(states, presets.H100) is live


def test_an_engine_that_is_too_small_is_told_how_many_gpus_hold_it() -> None:
    large = MODELS["32B"]
    small = job(large, ranks=64, gpu_gb=80.0)
    cause, remedy = fit.problem(large, replace(small, engine_share=0.6))
    assert "an engine's weights take 65.5 GB of each of its 1 GPUs" in cause
    assert "this fits: run.gpus_per_engine = 2" in remedy
    assert fit.cache_problem(large, replace(small, engine_gpus=2, reserved_gpus=2), 40960) == ("", "")
    cause, remedy = fit.cache_problem(large, small, 40960)
    assert "an engine (run.gpus_per_engine = 1) has 1.5 GB for its KV cache" in cause
    assert remedy.endswith("this fits: run.gpus_per_engine = 2")


@pytest.mark.parametrize(
    ("sample_tokens", "longest", "gpus"),
    [
        (40960, 9216, 2),
        (131072, 9216, 4),  # prompts and completions are shorter than what an engine must start with
        (40960, 8 * 40960, 2),  # as deterministic runs train them: a prompt's samples together
    ],
)
def test_an_engine_that_is_proposed_is_one_that_the_next_check_takes(
    sample_tokens: int, longest: int, gpus: int
) -> None:
    large = MODELS["32B"]
    small = job(
        large, ranks=64, engine_share=0.6, longest=longest, sample_tokens=sample_tokens, micro_tokens=1024
    )
    small = replace(small, gpu_gb=80.0, context=8 if longest > sample_tokens else 1)
    cause, remedy = fit.problem(large, small)
    assert "an engine's weights take" in cause
    assert remedy.endswith(f"this fits: run.gpus_per_engine = {gpus}")
    proposed = replace(small, engine_gpus=gpus, reserved=False)
    assert fit.problem(large, proposed) == fit.cache_problem(large, proposed, sample_tokens) == ("", "")
