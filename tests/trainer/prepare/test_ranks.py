"""Ranks that cannot be divided as `[trainer]` says, or whose model does not allow it, are told before any job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scavenger.errors import ConfigError
from scavenger.sizing import fit
from tests.trainer.prepare.hand import BIG, FITS, change, refused
from trainer.model import context
from trainer.prepare import check
from trainer.prepare.check import RequestedGpus

EIGHT = RequestedGpus(8, 4, 80.0, 2)


def told(run: Path, gpus: RequestedGpus) -> str:
    return next(finding.note for finding in check.check(run, gpus) if finding.what == "ranks")


def test_a_division_is_told(run: Path) -> None:
    assert told(run, EIGHT) == "8 ranks share the model"
    change(run, "[trainer]\n", "[trainer]\nreplicas = 2\ncontext_parallel = 2\n")
    assert told(run, EIGHT) == "4 ranks share the model, 2 replicas of it, 2 ranks share each sample"
    assert "not looked at" in told(run, RequestedGpus(1, 0, 0.0))


def test_one_rank_is_known_where_the_script_states_it(run: Path) -> None:
    script = "#SBATCH --nodes=1\n#SBATCH --ntasks=1\n"
    assert check.gpus_of(script).ranks_told
    assert told(run, check.gpus_of(script)) == "1 rank has the model"
    assert not check.gpus_of("#SBATCH --nodes=1\n").ranks_told
    change(run, "[trainer]\n", "[trainer]\nreplicas = 2\n")
    assert "1 rank" in refused(run, check.gpus_of(script))["ranks"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("replicas = 3", "trainer.replicas = 3 does not divide the training job's 8 rank"),
        ("replicas = 8\ncontext_parallel = 2", "does not divide the 1 rank(s) of each replica"),
        ("context_parallel = 4", "2 attention heads, which 4 ranks cannot share equally"),
        ("replicas = 4\ntensor_parallel = 4", "does not divide the 2 rank(s) of each replica"),
        ("tensor_parallel = 8", "trainer.tensor_parallel = 8 does not divide the 4 rank(s) of each node"),
        ("tensor_parallel = 2", "the model has 1 key-value heads, which 2 ranks cannot share equally"),
    ],
)
def test_a_division_that_cannot_be_is_refused_with_one_that_can(run: Path, keys: str, said: str) -> None:
    change(run, "[trainer]\n", f"[trainer]\n{keys}\n")
    found = refused(run, EIGHT)
    assert list(found) == ["ranks"], "once"
    assert said in found["ranks"]
    assert "remedy: set it to 1" in found["ranks"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}, "sinks"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "caps scores"),
        ({"model_type": "falcon_h1"}, "recurrent"),
    ],
)
def test_a_model_whose_tokens_ranks_cannot_share_is_refused(config: dict[str, object], said: str) -> None:
    shape = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    made = AutoConfig.for_model(**(shape | config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    with pytest.raises(ConfigError, match=said) as caught:
        context.check_model(model, 2)
    assert "set trainer.context_parallel = 1" in str(caught.value)


def test_memory_of_a_rank_falls_with_the_ranks_that_share_layers() -> None:
    """States are cut over all ranks either way; what a step takes is not."""
    shape = replace(BIG, heads=32, kv_heads=8, head_dim=128)
    whole, cut = fit.need(shape, FITS), fit.need(shape, replace(FITS, tensor=4))
    assert cut.states == pytest.approx(whole.states, rel=0.01)
    assert cut.step < 0.7 * whole.step
    assert not any(
        "tensor_parallel" in key for key in fit.propose(shape, replace(FITS, ranks=8, gpu_gb=28.0))
    )


def test_memory_is_of_one_replica_s_ranks_and_of_a_rank_s_share_of_the_longest_sample() -> None:
    wide = replace(FITS, ranks=32, replicas=2)
    assert (
        fit.need(BIG, wide).states
        == fit.need(BIG, FITS).states
        > fit.need(BIG, replace(wide, replicas=1)).states
    )
    long = replace(FITS, longest=131_072)
    assert "trainer.context_parallel = 2 or more" in fit.problem(BIG, replace(long, ranks=16))[1]
    assert fit.need(BIG, replace(long, context=4)).step == fit.need(BIG, replace(FITS, longest=32_768)).step
    assert fit.problem(BIG, replace(long, context=16)) == ("", "")
