"""The published points: the table is whole and consistent, and its constants give the calibrating rows without any policy's code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from scavenger.simulate.engine import Streams
from scavenger.simulate.oracle import Engine, Group, Step, bound
from scavenger.simulate.published import ROWS, STACK, Quantity, Row, Setting
from scavenger.simulate.startup import Pull
from scavenger.simulate.trainer_model import load_times, publish_s, to_generating_s, to_training_s
from tests.simulate.one_step import Fixed, Play


@dataclass
class Even(Fixed):
    """Joins the shortest queue; reserved engines generate until `close_s` and no longer."""

    def where(self, key: int, generated: int, up: object, play: Play) -> int | None:
        least = min(play.load, key=lambda index: (play.load[index], index))
        return least if play.load[least] < 96 or not play.harvested_later() else None

    def awake(self, play: Play) -> bool:
        return play.now < self.close_s


def step_of(setting: Setting, seed: int = 0) -> Step:
    trainer, engine, lengths = setting.trainer(), setting.engine(), setting.lengths()
    groups = tuple(
        Group(STACK.prompt_tokens, lengths.group(Streams(seed), 0, prompt, STACK.samples_per_prompt)) for prompt in range(STACK.prompts)
    )
    pulls = [Pull(f"spot{index}", 0.0, engine.model.weight_bytes) for index in range(setting.pairs)]
    loaded = load_times(trainer, pulls, STACK.engine_bytes_s, relay=False)
    reserved = [Engine(engine, reserved=True)] * (setting.reserved_gpus // STACK.engine_gpus)
    spot = [Engine(engine, ((loaded[pull.engine], math.inf),)) for pull in pulls]
    toggles = (to_training_s(trainer, STACK.offload_optimizer), to_generating_s(trainer, STACK.offload_optimizer, STACK.engine_gpus))
    return Step(groups, (*reserved, *spot), trainer, STACK.token_budget, *toggles, awake=False, publish_s=publish_s(trainer))


def throughput(setting: Setting, close_s: float) -> float:
    step = step_of(setting)
    took = Play(step, Even({}, close_s)).run()
    assert took >= bound(step).total_s
    return (sum(sum(group.targets) for group in step.groups) + step.samples * STACK.prompt_tokens) / took


def row(name: str) -> Row:
    return next(one for one in ROWS if one.name == name)


def test_the_constants_give_the_colocated_row() -> None:
    # close_s beyond the end: `Play` closes the window when every sample has come
    assert abs(row("colocated").error(throughput(Setting(), math.inf))) < 0.10


@pytest.mark.parametrize(("pairs", "close_s"), [(1, 400.0), (4, 180.0)])
def test_the_constants_give_the_calibrating_rows_with_a_window_near_the_best(pairs: int, close_s: float) -> None:
    name = "rlboost, 1 pair" if pairs == 1 else f"rlboost, {pairs} pairs"
    assert row(name).calibrates
    assert abs(row(name).error(throughput(Setting(pairs=pairs), close_s))) < 0.10


def test_the_table_has_every_published_point_once() -> None:
    assert len({one.name for one in ROWS}) == len(ROWS) == 13
    values = sorted(one.value for one in ROWS)
    assert values == sorted([10e3, 12e3, 14e3, 16e3, 18e3, 1.66, 1.97, 1.51, -0.19, 0.06, 0.34, 0.49, 0.28])
    assert [one.name for one in ROWS if one.calibrates] == ["colocated", "rlboost, 1 pair", "rlboost, 4 pairs"]
    for one in ROWS:
        assert one.source
        assert bool(one.against) == (one.quantity is not Quantity.TOKENS_PER_S)
        assert one.setting.engine().kv_capacity > 100_000, "the model fits its engines"


def test_a_rows_error_compares_factors() -> None:
    assert row("colocated").error(9000.0) == pytest.approx(-0.1)
    assert row("rlboost without seeding").error(-0.19) == 0.0
    assert row("rlboost, Qwen3-8B, per dollar").error(0.206) == pytest.approx(-0.1)


def test_prices_are_the_published_ones() -> None:
    assert Setting().dollars_per_hour(0.0) == 83.79
    assert Setting("Qwen3-32B", 16).dollars_per_hour(2.0) == pytest.approx(2 * 83.79 + 10.64)
