"""A planned run is played by the driver and comes back as figures; what cannot be played says why."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.baselines.registry import simulated_policy
from scavenger.cli import main
from scavenger.errors import ConfigError
from scavenger.simulate import play, presets
from scavenger.simulate.fleet import FleetTrace, from_deltas
from scavenger.simulate.lengths import Lognormal
from scavenger.simulate.plan import SimulationPlan, TrainingSettings
from scavenger.simulate.survey.survey import Observed, Question, SpeedUp

PLAN = SimulationPlan(
    "small", presets.QWEN3_8B, presets.H100, 2, 1, 4, 8, 4, 100, Lognormal.with_mean(300, 0.8, 1000, 0.5), 64
)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/site/run.toml"


def fleet(end_s: float = 3600.0, idle: int = 4, lost_at_s: float = 200.0) -> FleetTrace:
    """Four nodes of one GPU, `idle` of them free; one is taken."""
    names = [f"n{index}" for index in range(4)]
    initial = {name: int(index < idle) for index, name in enumerate(names)}
    return from_deltas(
        "hand", end_s, dict.fromkeys(names, 1), initial, [(lost_at_s, "n0", -1)] if idle else []
    )


def test_a_played_run_adds_up() -> None:
    shares: list[float] = []
    found = play.policy_runner(PLAN, fleet(), presets.UNCALIBRATED, steps=4)(
        "disaggregated", 0, shares.append
    )
    assert (found.policy, found.seed, found.steps) == ("disaggregated", 0, 4)
    assert sum(seconds for _, seconds in found.step_parts) == pytest.approx(found.seconds)
    assert found.reserved_gpu_s == pytest.approx(2 * found.seconds)
    assert 0 < found.harvested_gpu_s <= 4 * found.seconds
    assert 4 * 32 <= found.tokens <= 4 * 32 * 1000
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert found.owners is not None
    totals = [sum(values) for values in zip(*(line for _, line in found.owners.by_owner), strict=True)]
    assert set(totals) == {4 + 2}  # the fleet's, and the reserved ones


def test_the_same_seed_plays_the_same_and_policies_meet_the_same_answers() -> None:
    plays = play.policy_runner(PLAN, fleet(), presets.UNCALIBRATED, steps=2)
    first, again, other = (
        plays(name, seed, lambda _share: None)
        for name, seed in (("colocated", 0), ("colocated", 0), ("colocated", 1))
    )
    assert first == again
    assert other.tokens != first.tokens
    assert plays("disaggregated", 0, lambda _share: None).tokens == first.tokens


@pytest.mark.parametrize("policy", ["rlboost", "clairvoyant"])
def test_a_run_that_may_not_harvest_does_not(policy: str) -> None:
    alone = replace(PLAN, most_engines=0)
    plays = play.policy_runner(alone, fleet(), presets.UNCALIBRATED, 1, simulated_policy)
    found = plays(policy, 0, lambda _share: None)
    assert (found.policy, found.starts, found.harvested_gpu_s) == (policy, 0, 0.0)


def test_the_clairvoyant_is_made_for_the_very_scenario_that_is_played() -> None:
    plays = play.policy_runner(PLAN, fleet(), presets.UNCALIBRATED, 2, simulated_policy)
    knows, blind = (plays(name, 3, lambda _share: None) for name in ("clairvoyant", "ours"))
    assert knows.policy == "clairvoyant"
    assert knows.tokens == blind.tokens, "the same answers"
    assert knows.harvested_gpu_s > 0


def test_a_trace_that_ends_before_a_step_does_is_refused() -> None:
    with pytest.raises(ConfigError, match="colocated: no step ended within 5 s"):
        play.policy_runner(PLAN, fleet(5.0, lost_at_s=1.0), presets.UNCALIBRATED)(
            "colocated", 0, lambda _share: None
        )


def test_reserved_gpus_are_whole_engines() -> None:
    with pytest.raises(ConfigError, match="3 reserved GPUs are no whole engines of 2"):
        play.scenario_of(
            replace(PLAN, reserved_gpus=3, gpus_per_engine=2), fleet(), presets.UNCALIBRATED, 1, 0
        )


@pytest.mark.parametrize(
    ("names", "says"),
    [(["colocated", "best"], "no policy 'best'"), ([], "cannot be compared"), (["colocated"] * 2, "cannot")],
)
def test_policies_are_named_once_and_rightly(names: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        play.checked_policy_names(names)
    assert play.checked_policy_names(["ours", "colocated"]) == ("ours", "colocated")


def test_a_speed_up_is_played_in_windows_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "PROMPTS", 8)
    monkeypatch.setattr(play, "CAP", 1000)
    monkeypatch.setattr(play, "WINDOW_S", 600.0)
    ask = Question(presets.engine("Qwen3-8B", "H100"), 60.0)
    found = play.predict(Observed(fleet(1500.0)), ask, 2, policy="disaggregated")
    assert isinstance(found, SpeedUp)
    assert found.factor == pytest.approx(found.with_tokens_per_s / found.alone_tokens_per_s, rel=0.1)
    assert found.low <= found.factor <= found.high
    assert "2 reserved H100" in found.setting
    assert "2 windows of 0.166667 h" in found.setting
    assert all(note.startswith("assumed") for note in found.notes)
    assert (
        play.predict(Observed(fleet(500.0)), ask, 2, policy="disaggregated")
        == "a run is played over 0.166667 h at least, and this covers 0.1 h"
    )
    assert "no policy 'unheard'" in str(play.predict(Observed(fleet()), ask, 2, policy="unheard"))


# ---------------------------------------------------------------- the command


def simulate(*argv: str | Path) -> Result:
    return CliRunner().invoke(
        main.app, ["simulate", *map(str, argv)], env=dict(os.environ) | {"COLUMNS": "200"}
    )


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    text = (
        EXAMPLE.read_text(encoding="utf-8")
        .replace("prompts_per_step = 64", "prompts_per_step = 4")
        .replace("= 8192", "= 256")
    )
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(
        "t_seconds,node,idle_gpus,delta\n0,a,8,0\n0,b,2,0\n300,b,0,-2\n7200,b,2,2\n", encoding="utf-8"
    )
    return path


def test_policies_are_compared_over_a_trace(run_toml: Path, trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = simulate(
        "--trace",
        trace,
        run_toml,
        "--reserved-gpus",
        "2",
        "--model",
        "Qwen3-8B",
        "--policy",
        "colocated,disaggregated,ours",
        "--steps",
        "2",
        "--seeds",
        "2",
        "--html",
        page,
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert (
        "math-1: Qwen3-8B on 2 reserved H100, at most 16 harvested engines of 1, 4 prompts x 8 up to 256 tokens"
        in done.output
    )
    rows = {line.split()[0]: line.split() for line in done.output.splitlines() if line.split()}
    assert rows["policy"][:2] == ["policy", "tokens/s"]
    assert int(rows["colocated"][1].replace(",", "")) > 0
    assert rows["disaggregated"][0] == "disaggregated"
    assert int(rows["ours"][1].replace(",", "")) > 0
    assert "note: assumed: 2 GPUs train; completion lengths are lognormal" in done.output
    text = page.read_text(encoding="utf-8")
    assert "GPUs by owner over time: disaggregated, all" in text, "it harvested most"
    assert "Where a step" in text


def test_answers_are_drawn_from_a_file_and_drift(run_toml: Path, trace: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("source,output_tokens\nchat,10\nchat,200\ncode,30\n", encoding="utf-8")
    more = ["--drift", "0.1", "--model", "Qwen3-8B", "--policy", "colocated", "--steps", "1", "--seeds", "1"]
    done = simulate(run_toml, "--trace", trace, "--lengths", lengths, "--lengths-source", "chat", *more)
    assert done.exit_code == 0, (done.output, done.exception)
    assert (
        "8 GPUs train; completion lengths are drawn from the 2 of lengths.csv, source chat, up to the cap"
        in done.output
    )
    assert "+10.0% longer each step" in done.output
    wrong = simulate(run_toml, "--trace", trace, "--lengths", lengths, "--lengths-source", "talk", *more)
    assert isinstance(wrong.exception, ConfigError)
    assert "there are ['chat', 'code']" in wrong.exception.cause
    alone = simulate(run_toml, "--trace", trace, "--lengths-source", "chat", *more)
    assert (alone.exit_code, "--lengths-source goes with --lengths" in alone.output) == (2, True)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--policy", "nobody"], "no policy 'nobody'"),
        (["--from", "9"], "ends before hour 9"),
        (["--constants", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_what_cannot_be_played_names_its_cause(
    run_toml: Path, trace: Path, argv: list[str], says: str
) -> None:
    done = simulate(run_toml, "--trace", trace, "--reserved-gpus", "2", "--model", "Qwen3-8B", *argv)
    assert isinstance(done.exception, ConfigError), done.output
    assert says in done.exception.cause


def test_a_run_needs_something_to_be_played_over(run_toml: Path) -> None:
    done = simulate(run_toml, "--reserved-gpus", "2", "--model", "Qwen3-8B")
    assert done.exit_code == 2
    assert "give one of --sacct and --trace" in done.output


def test_a_scenario_has_the_run_s_own_settings() -> None:
    """Not a published system's: training state stays on the GPU where it fits beside the engine."""
    small = replace(PLAN, reserved_gpus=8, training=TrainingSettings(memory_share=0.5, round_tokens=1234))
    scenario = play.scenario_of(small, fleet(), presets.UNCALIBRATED, 1, 0)
    assert (scenario.offload, scenario.round_tokens) == (False, 1234)
    assert scenario.reserved.efficiency.memory_share == 0.5
    assert (scenario.trainer.recompute, scenario.trainer.forwards) == (False, 0)
    assert play.scenario_of(replace(small, reserved_gpus=2), fleet(), presets.UNCALIBRATED, 1, 0).offload
