"""Quantised rollouts: vLLM quantises what the trainer publishes, at each load; the trainer corrects for the difference.

vLLM's own online fp8 loads and reloads here, on a CPU, with torch in place of its two kernels (`planted_fp8`). Its kernels were not run:
this vLLM has none for CPUs.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollout.engines.base import EngineHost
from scavenger import config as configs
from scavenger.errors import ConfigError, WeightsDiffer
from scavenger.protocol import engine_options

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
from rollout.engines.checksum import checksum  # noqa: E402  needs torch, as all that follows
from rollout.engines.vllm import setup  # noqa: E402
from tests.rollout.test_engine_contract import GREEDY, finish, request  # noqa: E402

RUN = """
[run]
name = "r"
steps = 1
state_dir = "state"
out_dir = "out"
[model]
path = "model"
context_length = 64
[sampling]
max_tokens = 8
[reward]
function = "m:f"
[engine]
name = "vllm"
[engine.vllm]
quantization = "{way}"
[algorithm]
importance = "{importance}"
"""


def read(folder: Path, way: str, importance: str) -> configs.RunConfig:
    path = folder / "run.toml"
    path.write_text(RUN.format(way=way, importance=importance))
    return configs.read_run(path)


def test_a_quantised_engine_needs_the_correction(tmp_path: Path) -> None:
    assert read(tmp_path, "fp8", "truncate").engine.vllm == {"quantization": "fp8"}
    with pytest.raises(ConfigError, match=r"quantization needs algorithm\.importance"):
        read(tmp_path, "fp8", "off")


def test_only_what_vllm_quantises_as_it_loads_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'awq' needs weights that were quantised before"):
        read(tmp_path, "awq", "truncate")
    assert engine_options.fault({"quantization": "fp8_per_block"}, harvested=True) is None
    assert engine_options.fault({"quantization": "gptq"}, harvested=True) is not None


def test_bytes_have_checksums_too() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).view(torch.uint8)
    assert checksum(values) != checksum(values.flip(0) + 1)
    assert checksum(values).finite


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
def test_every_load_is_quantised_anew_and_what_did_not_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.engines.vllm import engine as vllm

    # Fused weights are quantised together; beyond that the engine computes what transformers does with rounded weights.
    monkeypatch.setattr(setup, "EXTENSION", "tests.rollout.planted_fp8.Extension")
    text = models.config_text(head_dim=32, hidden_size=64, vocab_size=100)
    spec = models.spec(text, dtype="bfloat16", name="vllm")
    spec = replace(spec, options=json.dumps({"quantization": "fp8_per_tensor"}))
    old, new = (models.plain_model(text, seed, 2.0).to(torch.bfloat16) for seed in (0, 1))

    async def main() -> None:
        engine = await vllm.build(spec, EngineHost("run"))
        try:
            made: dict[int, Any] = {}
            for version, model in ((1, old), (2, new), (3, old)):
                await engine.load(version, models.views(model))
                made[version] = await finish(engine, request(0, GREEDY))
            assert made[1] == made[3], "what was quantised for version 2 is left of nothing"
            assert made[1] != made[2]
            _near(made[1][0], old)
            _near(made[2][0], new)
            (kinds,) = await engine._core.rpc("dtypes")
            assert kinds["model.layers.1.self_attn.qkv_proj.weight"] == "torch.float8_e4m3fn"
            await engine._find_again()
            await engine._core.rpc("plant", "layers.1.self_attn.k_proj.weight")
            with pytest.raises(WeightsDiffer, match=r"layers\.1\.self_attn\.qkv_proj\.weight"):
                await engine.load(4, models.views(new))
        finally:
            await engine.close()

    asyncio.run(main())


def _near(delta: Any, model: Any) -> None:
    prompt = request(0, GREEDY).prompt
    logits = model(torch.tensor([prompt + delta.token_ids])).logits[0, len(prompt) - 1 : -1].float()
    exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(delta.token_ids)[:, None])[:, 0]
    gap = (exact - torch.tensor(delta.raw_logprobs)).abs()
    assert float(gap.max()) > 1e-4, "nothing was rounded"
    assert float(gap.mean()) < 0.3
