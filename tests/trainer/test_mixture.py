"""Several data sets by weight: each step has its share of each, the same in every attempt, and rewards know which set a row is of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from scavenger.config import AlgorithmSection, RewardSection, RunConfig
from scavenger.errors import ConfigError
from tests.trainer.test_datasets import problems_of, write
from tests.trainer.test_recovery import Judge, group
from trainer.algorithms.scoring import Scoring
from trainer.data.mixture import Mixture
from trainer.loop.metrics import parts


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), st.integers(0, 400), st.integers(1, 64))
def test_every_stretch_has_each_set_s_share_within_two(weights: list[float], begin: int, length: int) -> None:
    mixture = Mixture(weights)
    found = [0] * len(weights)
    for position in range(begin, begin + length):
        found[mixture.at(position).set] += 1
    for count, weight in zip(found, weights, strict=True):
        assert abs(count - length * weight / sum(weights)) < 2
    assert Mixture(weights).at(begin) == mixture.at(begin), "whatever was asked before"


def test_each_set_is_read_in_its_own_order() -> None:
    mixture = Mixture([3.0, 1.0])
    assert [mixture.at(position) for position in range(5)] == [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3)]
    assert mixture.counts(8) == [6, 2]
    for wrong in ([], [1.0, 0.0], [-1.0]):
        with pytest.raises(ValueError, match="all above 0"):
            Mixture(wrong)


def config_of(model: Path, folder: Path, **data: Any) -> RunConfig:
    """Two sets, of which one calls its columns otherwise."""
    write(folder / "long.jsonl", [{"prompt": f"1{number}", "answer": "1"} for number in range(6)])
    write(folder / "short.parquet", [{"question": f"2{number}", "truth": "2"} for number in range(3)])
    sets = [
        {"name": "long", "path": folder / "long.jsonl", "weight": 3},
        {
            "name": "short",
            "path": folder / "short.parquet",
            "task": "parquet",
            "prompt_field": "question",
            "answer_field": "truth",
        },
    ]
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 3, "state_dir": "s", "out_dir": "o"},
            "model": {"path": model, "context_length": 21},
            "sampling": {"max_tokens": 8},
            "data": {"sets": sets, "prompts_per_step": 4} | data,
            "eval": {"prompts": 4},
        }
    )


def test_a_step_mixes_the_sets_and_held_out_rows_of_each_are_never_trained(
    model_folder: Path, tmp_path: Path
) -> None:
    prompts = problems_of(config_of(model_folder, tmp_path))
    held_out = prompts.held_out()
    assert [one.meta["data_set"] for one in held_out] == ["long", "long", "short", "long"]
    taken = prompts.take(0, 40)
    for step in range(10):
        names = [one.meta["data_set"] for one in taken[4 * step : 4 * step + 4]]
        assert sorted(names) == ["long", "long", "long", "short"]
    assert not {one.text for one in held_out} & {one.text for one in taken}
    assert {one.text for one in (*taken, *held_out)} == {f"1{n}" for n in range(6)} | {
        f"2{n}" for n in range(3)
    }
    assert {one.meta["answer"] for one in taken if one.meta["data_set"] == "short"} == {"2"}
    again = problems_of(config_of(model_folder, tmp_path))
    assert (again.take(17, 3), again.digest) == (taken[17:20], prompts.digest)


def test_a_resumed_run_is_told_of_other_weights(model_folder: Path, tmp_path: Path) -> None:
    config = config_of(model_folder, tmp_path)
    sets = [one.model_copy(update={"weight": 1.0}) for one in config.data.sets]
    other = config.model_copy(update={"data": config.data.model_copy(update={"sets": tuple(sets)})})
    assert problems_of(config).digest != problems_of(other).digest


def test_held_out_prompts_may_come_from_a_file_of_their_own(model_folder: Path, tmp_path: Path) -> None:
    config = config_of(model_folder, tmp_path)
    path = write(tmp_path / "held.jsonl", [{"prompt": f"3{number}", "answer": "3"} for number in range(5)])
    prompts = problems_of(config.model_copy(update={"eval": config.eval.model_copy(update={"path": path})}))
    assert {one.text[0] for one in prompts.held_out()} == {"3"}
    assert len({one.text for one in prompts.take(0, 40)}) == 9, "nothing of the sets is held out"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"path": "x.jsonl"}, "leave out path"),
        ({"sets": [{"name": "a", "path": "x"}, {"name": "a", "path": "y"}]}, "two are named 'a'"),
        ({"sets": [{"name": "a", "path": "x", "weight": 0}]}, "greater than 0"),
        ({"environment": "e"}, "leave out task, path and sets"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    model_folder: Path, tmp_path: Path, data: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        config_of(model_folder, tmp_path, **data)


def test_a_set_that_is_too_small_and_a_column_that_has_the_name_are_told_with_the_set(
    model_folder: Path, tmp_path: Path
) -> None:
    small = write(tmp_path / "small.jsonl", [{"prompt": "11", "answer": "1"}])
    config = config_of(model_folder, tmp_path, sets=[{"name": "small", "path": small}])
    with pytest.raises(ConfigError, match=r"data\.sets: 'small' has 1 rows, 4 held-out prompts"):
        problems_of(config)
    named = write(tmp_path / "named.jsonl", [{"prompt": "11", "data_set": "mine"}] * 9)
    config = config_of(model_folder, tmp_path, sets=[{"name": "named", "path": named}])
    with pytest.raises(ConfigError, match=r"named\.jsonl: a column is named 'data_set'"):
        problems_of(config)


def test_each_set_s_rewards_have_a_metric_of_their_own() -> None:
    """Those that an earlier attempt recorded count too; a prompt of no set has none, and no column names a metric."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, "x"))
    sections = RewardSection(), AlgorithmSection()
    hard = msgspec.structs.replace(group((1.0, "v2"), (None, "")), group_id=1, meta='{"data_set": "hard"}')
    plain = msgspec.structs.replace(
        group((None, ""), (None, "")), group_id=2, meta='{"data_set": ["of a column"]}'
    )

    def found(sets: Sequence[str]) -> dict[str, float]:
        scoring = Scoring(Judge("v2"), tokenizer, *sections, print, sets=sets)
        scored = [scoring.score(one) for one in (hard, plain)]
        return parts(one for of_group in scored for one in of_group.parts)

    assert found(["hard", "easy"]) == {"reward_of_hard": 1.5}
    assert found([]) == {}


def test_errors_name_the_set_s_own_keys(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    config = config_of(model_folder, tmp_path, sets=[{"name": "a", "path": path}])
    with pytest.raises(ConfigError, match=r"data\.sets\.path: .*rows\.jsonl"):
        problems_of(config)
    write(path, [{"question": "11"}])
    with pytest.raises(ConfigError) as refused:
        problems_of(config)
    assert "set data.sets.prompt_field" in str(refused.value)
