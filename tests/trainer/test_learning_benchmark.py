"""What benchmarks/learning.py concludes from its runs; and that its runs' files are whole. No run is made here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import learning
from scavenger import toml
from scavenger.config import read_run


def run(arm: str, seed: int, last: float, moves: float = 3.0) -> dict[str, Any]:
    return {
        "arm": arm,
        "seed": seed,
        "eval_steps": [0, 10],
        "sampled": [0.3, last],
        "greedy": [0.5, 0.9],
        "reward": [0.3],
        "moves": moves,
        "mismatch_k3": 1e-5,
    }


def pairs(*differences: float, moves: float = 3.0) -> list[dict[str, Any]]:
    found = []
    for seed, difference in enumerate(differences):
        found += [run("reference", seed, 0.85, 0.0), run("vllm", seed, 0.85 + difference, moves)]
    return found


def test_the_interval_is_student_s() -> None:
    mean, low, high = learning.interval([0.01, 0.02, 0.03, 0.02, 0.02])
    assert mean == pytest.approx(0.02)
    assert (low, high) == pytest.approx(
        (0.02 - 2.132 * 0.0070711 / 5**0.5, 0.02 + 2.132 * 0.0070711 / 5**0.5), abs=1e-6
    )


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (pairs(0.01, 0.0, -0.01, 0.0, 0.005), True),
        (pairs(0.05, 0.04, 0.05, 0.04, 0.05), False),  # another accuracy
        (pairs(0.1, -0.1, 0.1, -0.1, 0.0), False),  # equal on average, and nothing shown
        (pairs(0.0), False),  # one pair shows nothing
        (pairs(0.01, 0.0, -0.01, 0.0, 0.005, moves=0.0), False),  # nobody was preempted
        ([*pairs(0.0, 0.001), run("random", 0, 0.9)], False),  # the control learnt
        ([*pairs(0.0, 0.001), run("random", 0, 0.0)], True),
    ],
)
def test_the_verdict(found: list[dict[str, Any]], met: bool) -> None:
    said, fine = learning.verdict(found)
    assert fine is met, said


def off_policy(*differences: float, age: float = 2.0) -> list[dict[str, Any]]:
    found = []
    for seed, difference in enumerate(differences):
        found += [run("k0", seed, 0.9) | {"age": 0.0}, run("k8off", seed, 0.9 + difference) | {"age": age}]
    return found


@pytest.mark.parametrize(
    ("found", "visible"),
    [
        (off_policy(-0.1, -0.12, -0.11), True),
        (off_policy(-0.1, 0.1, -0.11), False),  # worse on average, and nothing shown
        (off_policy(-0.1), False),  # one pair shows nothing
        (off_policy(0.1, 0.12, 0.11), False),
    ],
)
def test_a_control_tells_whether_harm_is_visible_and_has_no_goal(
    found: list[dict[str, Any]], visible: bool
) -> None:
    said, fine = learning.verdict(found)
    assert fine
    (line,) = (line for line in said if line.startswith("k8off - k0"))
    assert line.endswith("the harm is visible" if visible else "no harm is visible")
    assert not learning.verdict(off_policy(-0.1, -0.12, age=0.0))[1]  # nothing was stale


def test_a_run_whose_engines_were_set_aside_meets_no_goal_and_the_oldest_sample_is_told() -> None:
    found = [one | {"oldest": 3.0} for one in off_policy(-0.1, -0.12)]
    said, fine = learning.verdict(found)
    assert fine
    assert any(line.endswith("the oldest 3 of 8") for line in said)
    assert not learning.verdict([one | {"set_aside": 1.0} for one in found])[1]


def test_a_folder_s_runs_of_several_calls_are_told_together(tmp_path: Path) -> None:
    for one in (run("k8off", 3, 0.8), run("k0", 3, 0.9), run("k0", 0, 0.9)):
        (tmp_path / f"{one['arm']}-{one['seed']}.json").write_text(json.dumps(one))
    (tmp_path / "learning.json").write_text("{}")
    found = [(one["arm"], one["seed"]) for one in learning.kept_runs(tmp_path)]
    assert found == [("k0", 0), ("k0", 3), ("k8off", 3)]


def test_the_plot_has_a_line_a_run() -> None:
    assert learning.plot(pairs(0.0, 0.0)).count("<polyline") == 4


@pytest.mark.parametrize("arm", learning.ARMS, ids=lambda arm: arm.name)
def test_every_arm_s_run_toml_can_be_read(arm: learning.Arm, tmp_path: Path) -> None:
    options = argparse.Namespace(
        steps=4,
        engines=1,
        prompts=32,
        lr=1e-4,
        eval_every=25,
        eval_prompts=16,
        weights_dtype="bfloat16",
        reward_s=2.0 if arm.k else 0.0,
    )
    site = SimpleNamespace(dir=tmp_path, state_dir=tmp_path / "state")
    path = tmp_path / "run.toml"
    path.write_text(toml.dumps(learning.document(arm, 1, tmp_path, site, options)))  # type: ignore[arg-type]
    config = read_run(path)
    assert config.reward.function == ("benchmarks.learning:slow" if arm.k else arm.reward)
    assert (config.engine.name, config.run.harvest, config.algorithm.importance) == (
        arm.engine,
        arm.preempted,
        arm.importance,
    )


def test_the_coin_says_nothing_of_the_answer_and_evaluations_are_told_the_truth() -> None:
    heads = [learning.coin("531>", str(n), {"answer": "135"}) for n in range(400)]
    assert 120 < sum(heads) < 280
    assert heads == [learning.coin("531>", str(n), {"answer": "135"}) for n in range(400)]
    assert [learning.coin("", said, {"answer": "1", "mode": "greedy"}) for said in ("1", "2")] == [1.0, 0.0]
