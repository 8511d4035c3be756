"""The published points: the table is whole and consistent, and its constants give the rows with constant pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from benchmarks.baselines.points import ROWS, PublishedPoint, Quantity, Setting, scenario, steady, throughput
from benchmarks.baselines.registry import simulated_policy
from benchmarks.oracle import OracleEngine, OracleGroup, OracleStep
from scavenger.simulate.clock import Streams
from scavenger.simulate.driver import simulate
from scavenger.simulate.presets import STACK
from scavenger.simulate.trainer_model import publish_s, to_generating_s, to_training_s
from tests.simulate.one_step import Fixed, Play


@dataclass
class Even(Fixed):
    """Joins the shortest queue; reserved engines generate until `close_s` and no longer."""

    def where(self, key: int, generated: int, up: object, play: Play) -> int | None:
        least = min(play.load, key=lambda index: (play.load[index], index))
        return least if play.load[least] < 96 or not play.harvested_later() else None

    def awake(self, play: Play) -> bool:
        return play.now < self.close_s


def step_of(setting: Setting, seed: int = 0) -> OracleStep:
    trainer, engine, lengths = setting.trainer(), setting.engine(), setting.lengths()
    groups = tuple(
        OracleGroup(STACK.prompt_tokens, lengths.group(Streams(seed), 0, prompt, STACK.samples_per_prompt))
        for prompt in range(STACK.prompts)
    )
    loaded_s = engine.model.weight_bytes * max(1 / STACK.engine_bytes_s, setting.pairs / trainer.nic_bytes_s)
    reserved = [OracleEngine(engine, reserved=True)] * (setting.reserved_gpus // STACK.engine_gpus)
    spot = [OracleEngine(engine, ((loaded_s, math.inf),))] * setting.pairs
    toggles = (
        to_training_s(trainer, STACK.offload_optimizer),
        to_generating_s(trainer, STACK.offload_optimizer, STACK.engine_gpus),
    )
    return OracleStep(
        groups,
        (*reserved, *spot),
        trainer,
        STACK.token_budget,
        *toggles,
        awake=False,
        publish_s=publish_s(trainer),
    )


def row(name: str) -> PublishedPoint:
    return next(one for one in ROWS if one.name == name)


def simulated(pairs: int, policy: str, steps: int) -> float:
    cell = scenario(Setting(pairs=pairs), steady(pairs, 1e6), steps, 0)
    return throughput(simulate(cell, simulated_policy(policy, cell)))


def test_the_constants_give_the_colocated_row() -> None:
    assert abs(row("colocated").error(simulated(0, "colocated", 2))) < 0.05


@pytest.mark.long
@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
def test_the_constants_give_the_rows_with_constant_pairs(pairs: int) -> None:
    name = "rlboost, 1 pair" if pairs == 1 else f"rlboost, {pairs} pairs"
    assert abs(row(name).error(simulated(pairs, "rlboost", 12))) < 0.10


def test_the_table_has_every_published_point_once() -> None:
    assert len({one.name for one in ROWS}) == len(ROWS) == 13
    values = sorted(one.value for one in ROWS)
    assert values == sorted([10e3, 12e3, 14e3, 16e3, 18e3, 1.66, 1.97, 1.51, -0.19, 0.06, 0.34, 0.49, 0.28])
    assert [one.name for one in ROWS if one.calibrates] == [
        "colocated",
        "rlboost, 1 pair",
        "rlboost, 4 pairs",
    ]
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
