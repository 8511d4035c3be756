"""Planted parameters come back from noisy points; what points cannot tell is said; wrong files name their entry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scavenger.errors import ConfigError
from scavenger.simulate.calibrate import MeasuredPoint, fit, parse, read
from scavenger.simulate.decode import Efficiency, SimulatedEngine
from scavenger.simulate.presets import UNCALIBRATED, engine

GRID = [
    (batch, context)
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for context in (256, 1024, 4096)
    if batch * context < 300_000
]
PLANTED = replace(UNCALIBRATED, bandwidth=0.72, decode_compute=0.31, overhead_s=2.5e-3)


def planted(
    spec: SimulatedEngine, noise: float, seed: int = 0, grid: list[tuple[int, int]] = GRID
) -> list[MeasuredPoint]:
    draw = np.random.default_rng(seed)
    return [
        MeasuredPoint(b, c, spec.tokens_per_s(b, c) * float(np.exp(noise * draw.standard_normal())))
        for b, c in grid
    ]


# 8 % of compute: a roofline that bends inside the grid, as on a GPU with little compute
@pytest.mark.parametrize("compute", [0.31, 0.08])
@pytest.mark.parametrize(
    ("model", "gpu", "gpus"), [("Qwen3-8B", "A100", 1), ("Qwen3-14B", "A100", 2), ("Qwen3-8B", "H100", 1)]
)
def test_planted_parameters_come_back_exactly_without_noise(
    model: str, gpu: str, gpus: int, compute: float
) -> None:
    truth = replace(PLANTED, decode_compute=compute)
    points = planted(engine(model, gpu, gpus, truth), noise=0.0)
    found = fit(engine(model, gpu, gpus), points)
    assert {one.bound for one in found.residuals} == {"memory", "compute"} or found.notes
    assert found.efficiency.bandwidth == pytest.approx(truth.bandwidth, rel=1e-6)
    assert found.efficiency.overhead_s == pytest.approx(truth.overhead_s, rel=1e-6)
    if not found.notes:
        assert found.efficiency.decode_compute == pytest.approx(compute, rel=1e-6)
    assert found.worst_error < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_planted_parameters_come_back_from_noisy_points_with_their_residuals(seed: int) -> None:
    truth = replace(PLANTED, decode_compute=0.1)
    points = planted(engine("Qwen3-8B", "A100", 1, truth), noise=0.03, seed=seed)
    found = fit(engine("Qwen3-8B", "A100"), points)
    assert not found.notes
    assert found.efficiency.bandwidth == pytest.approx(truth.bandwidth, rel=0.05)
    assert found.efficiency.decode_compute == pytest.approx(truth.decode_compute, rel=0.05)
    assert found.efficiency.overhead_s == pytest.approx(truth.overhead_s, abs=8e-4)
    assert 0.015 < found.rms_error < 0.04
    assert found.worst_error == pytest.approx(max(abs(one.error) for one in found.residuals))
    fitted = engine("Qwen3-8B", "A100", 1, found.efficiency)
    for one in found.residuals:
        assert one.predicted_tokens_per_s == pytest.approx(
            fitted.tokens_per_s(one.point.batch, one.point.context), rel=1e-9
        )


def test_no_other_parameters_fit_better() -> None:
    truth = replace(PLANTED, decode_compute=0.1)
    points = planted(engine("Qwen3-8B", "A100", 1, truth), noise=0.05)
    found = fit(engine("Qwen3-8B", "A100"), points)

    def rms(efficiency: Efficiency) -> float:
        spec = engine("Qwen3-8B", "A100", 1, efficiency)
        errors = [one.tokens_per_s / spec.tokens_per_s(one.batch, one.context) - 1 for one in points]
        return float(np.sqrt(np.mean(np.square(errors))))

    assert rms(found.efficiency) == pytest.approx(found.rms_error)
    for name in ("bandwidth", "decode_compute", "overhead_s"):
        for factor in (0.98, 1.02):
            other = replace(found.efficiency, **{name: getattr(found.efficiency, name) * factor})
            assert rms(other) >= found.rms_error


def test_points_that_cannot_tell_the_compute_share_leave_it_and_say_so() -> None:
    points = planted(
        engine("Qwen3-8B", "H100", 1, PLANTED), 0.0, grid=[(1, 500), (2, 2000), (4, 4000), (8, 8000)]
    )
    found = fit(engine("Qwen3-8B", "H100"), points)
    assert found.efficiency.decode_compute == engine("Qwen3-8B", "H100").efficiency.decode_compute
    assert any("compute" in note for note in found.notes)
    assert found.efficiency.bandwidth == pytest.approx(0.72, rel=1e-6)


def test_points_that_cannot_tell_the_bandwidth_say_so() -> None:
    truth = replace(PLANTED, decode_compute=0.01)
    points = planted(
        engine("Qwen3-8B", "A100", 1, truth), 0.0, grid=[(64, 200), (128, 300), (256, 100), (200, 400)]
    )
    found = fit(engine("Qwen3-8B", "A100"), points)
    assert any("memory bandwidth" in note for note in found.notes)
    assert found.efficiency.decode_compute == pytest.approx(0.01, rel=1e-6)
    assert found.worst_error < 1e-9


def test_points_faster_than_the_datasheet_are_noticed() -> None:
    points = [MeasuredPoint(b, c, 3 * engine("Qwen3-8B", "A100").tokens_per_s(b, c)) for b, c in GRID]
    found = fit(engine("Qwen3-8B", "A100"), points)
    assert any("faster than" in note for note in found.notes)
    assert found.efficiency.bandwidth <= 1
    assert found.worst_error > 0.1


def test_two_points_are_not_enough() -> None:
    with pytest.raises(ConfigError, match="2 points"):
        fit(engine("Qwen3-8B", "A100"), [MeasuredPoint(1, 100, 70.0), MeasuredPoint(2, 100, 140.0)])


def test_a_file_holds_objects_or_triples(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    path.write_text(
        json.dumps(
            [
                {"batch": 8, "context": 2048, "tokens_per_s": 900},
                {"batch": 1.0, "context": 10.5, "tokens_per_s": 80.5},
            ]
        )
    )
    assert read(path) == (MeasuredPoint(8, 2048.0, 900.0), MeasuredPoint(1, 10.5, 80.5))
    assert parse(b"[[8, 2048, 900], [1, 10.5, 80.5]]") == read(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a list"),
        ('{"batch": 1}', "not a list"),
        ('[{"batch": 1, "context": 5}]', "tokens_per_s"),
        ('[{"batch": 1, "context": 5, "tokens_per_s": 9, "gpu": 1}]', "gpu"),
        ('[{"batch": 1.5, "context": 5, "tokens_per_s": 9}]', "int"),
        ("[[1, 2]]", "length 3"),
        ("[[1, 5, 9], [4, 5, 0]]", "point 2"),
    ],
)
def test_a_wrong_file_says_what_is_wrong_and_where(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read(path)
    assert "points.json" in caught.value.cause
    assert "tokens_per_s" in caught.value.remedy


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        read(tmp_path / "none.json")
