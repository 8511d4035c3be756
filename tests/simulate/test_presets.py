"""The presets agree with what their makers say, and with one measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.errors import ConfigError
from scavenger.simulate import calibrate, presets
from scavenger.simulate.decode import Model, SimulatedEngine


@pytest.mark.parametrize(
    ("name", "total", "without_embeddings"),
    [("Qwen3-8B", 8.2, 6.95), ("Qwen3-14B", 14.8, 13.2), ("Qwen3-32B", 32.8, 31.2)],
)
def test_parameters_add_up_to_those_of_the_model_cards(
    name: str, total: float, without_embeddings: float
) -> None:
    model = presets.model(f"Qwen/{name}")
    assert model.parameters / 1e9 == pytest.approx(total, abs=0.06)
    assert model.layers * model.layer_parameters / 1e9 == pytest.approx(without_embeddings, abs=0.06)


def test_the_uncalibrated_curve_gives_the_measurement_it_cites() -> None:
    # Llama-3.1-8B (config.json: 32 layers, hidden 4096, 32 and 8 heads of 128, intermediate 14336, vocabulary 128256) on an A100 40GB
    # (1,555 GB/s): 75 tok/s at batch 1 with about 1,100 tokens of context
    llama = Model("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14_336, 128_256)
    a100_40 = replace(presets.A100, memory_bytes=40e9, bandwidth_bytes_s=1.555e12)
    assert SimulatedEngine(llama, a100_40, presets.UNCALIBRATED).tokens_per_s(1, 1100) == pytest.approx(
        75, rel=0.02
    )


def test_the_fitted_curve_is_the_fit_of_the_measurements_it_cites() -> None:
    points = [
        calibrate.MeasuredPoint(batch, context, batch / step)
        for (batch, context), step in presets.VLLM_H100_STEPS.items()
    ]
    found = calibrate.fit(presets.engine("Qwen3-8B", "H100"), points)
    assert found.rms_error < 0.027
    assert found.worst_error < 0.067
    for name in ("bandwidth", "decode_compute", "overhead_s"):
        assert getattr(presets.VLLM_H100, name) == pytest.approx(getattr(found.efficiency, name), rel=0.005)
    fitted = presets.engine("Qwen3-8B", "H100", efficiency=presets.VLLM_H100)
    for (batch, context), step in presets.VLLM_H100_STEPS.items():
        assert fitted.step_s(batch, batch * context) == pytest.approx(step, rel=0.07)


def test_more_bandwidth_decodes_faster_and_bigger_models_slower() -> None:
    speeds = [presets.engine("Qwen3-8B", gpu).tokens_per_s(32, 4000) for gpu in ("a100", "h100", "h200")]
    assert speeds == sorted(speeds)
    sizes = [
        presets.engine(name, "H200").tokens_per_s(32, 4000) for name in ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_every_model_fits_every_gpu_with_room_for_kv_and_32b_has_little_on_one() -> None:
    for model in presets.MODELS:
        for gpu in presets.GPUS:
            assert presets.engine(model, gpu).kv_capacity > 0
    assert (
        presets.engine("Qwen3-32B", "H100").kv_capacity
        < 50_000
        < presets.engine("Qwen3-32B", "H100", 2).kv_capacity
    )


def test_an_unknown_name_says_which_are_known() -> None:
    with pytest.raises(ConfigError, match="A100, H100, H200"):
        presets.gpu("B200")
    with pytest.raises(ConfigError, match="Qwen3-14B"):
        presets.model("Qwen3-4B")
