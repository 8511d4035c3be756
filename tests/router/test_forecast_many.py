"""Forecasts for many samples at once are those of one sample at a time, to the last bit."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from scavenger.policy.forecast import lengths_of_step
from scavenger.policy.forecast.lengths import Belief, GroupLengths, LengthForecast, LengthTable, impute


def learned(seed: int, cap: int) -> LengthForecast:
    rng = random.Random(seed)
    lengths = LengthForecast(cap)
    for _ in range(3):
        groups = [
            [min(cap, max(1, int(rng.lognormvariate(6 + rng.random(), 0.9)))) for _ in range(8)]
            for _ in range(20)
        ]
        for length in (length for group in groups for length in group):
            lengths.finished(length)
        lengths.step_ended(groups)
    return lengths


def of_all(
    table: LengthTable, groups: Mapping[int, GroupLengths]
) -> tuple[lengths_of_step.Present, list[tuple[int, int, Sequence[int]]]]:
    """These groups' samples in one column, and where each one's are."""
    spans: list[tuple[int, int, Sequence[int]]] = []
    first = 0
    for group in groups.values():
        spans.append((first, first + len(group.running), group.finished))
        first += len(group.running)
    have = [length for group in groups.values() for length in group.running]
    return lengths_of_step.Present(table, have), spans


@pytest.mark.parametrize("seed", range(20))
def test_many_samples_at_once_get_what_each_gets_alone(seed: int) -> None:
    rng = random.Random(seed)
    cap = rng.choice([7, 300, 4096, 14_336])
    forecast = learned(seed, cap) if seed % 4 else LengthForecast(cap)
    groups = {
        key: GroupLengths(
            tuple(rng.randint(1, cap) for _ in range(rng.randint(0, 4))),
            tuple(rng.choice([0, 1, rng.randint(0, cap), cap - 1, cap]) for _ in range(rng.randint(1, 8))),
        )
        for key in rng.sample(range(1000), 30)
    }
    table = forecast.table([length for group in groups.values() for length in group.running if length])
    beliefs = {
        key: rng.choice([table.belief(group), Belief(rng.uniform(-40, 40), rng.uniform(0, 1))])
        for key, group in groups.items()
    }
    present, spans = of_all(table, groups)
    alone = [table.expected(beliefs[key], have) for key, group in groups.items() for have in group.running]
    counted = [(beliefs[key], len(group.running)) for key, group in groups.items()]
    assert lengths_of_step.expected(present, counted).tolist() == alone
    drawn = impute(table, groups, beliefs)
    together = lengths_of_step.impute(
        present, [(key, beliefs[key], n) for key, (_, n) in zip(groups, counted, strict=True)]
    )
    assert together.tolist() == [length for key in groups for length in drawn[key]]
    solved = [table.belief(group) for group in groups.values()]
    assert lengths_of_step.beliefs(present, spans) == solved
    assert lengths_of_step.beliefs(present, spans[3:6]) == solved[3:6], "few are solved one by one"


@pytest.mark.parametrize("correlation", [0.0, 0.02, 0.97])
def test_beliefs_of_many_groups_are_those_of_each_alone(correlation: float) -> None:
    """Also where nothing is known of some, all of some are done or capped, or siblings are not alike."""
    rng = random.Random(7)
    table = replace(learned(3, 4096).table(), correlation=correlation)
    groups = dict(
        enumerate(
            [
                GroupLengths((), (0,) * 8),
                GroupLengths((4096,) * 7, (0,)),
                GroupLengths((4096, 1, 4096), (4095, 4000, 0)),
                GroupLengths((1,) * 7, (4096,)),
                GroupLengths((), (1,)),
                *(
                    GroupLengths(
                        tuple(rng.randint(1, 4096) for _ in range(rng.randint(0, 12))),
                        tuple(rng.choice([0, rng.randint(1, 4096)]) for _ in range(rng.randint(1, 12))),
                    )
                    for _ in range(200)
                ),
            ]
        )
    )
    present, spans = of_all(table, groups)
    assert lengths_of_step.beliefs(present, spans) == [table.belief(group) for group in groups.values()]
    assert lengths_of_step.beliefs(present, [(0, 8, ())] * 8) == [Belief()] * 8


@pytest.mark.parametrize("cap", [1, 7, 14_336, lengths_of_step.LONG + 1])
def test_a_length_that_is_looked_up_stands_where_a_search_finds_it(cap: int) -> None:
    """For every cap its own: what was looked up for another one says nothing."""
    lengths, rng = learned(2, cap), random.Random(cap)
    have = sorted({0, 1, cap - 1, cap, *(rng.randint(0, cap) for _ in range(2000))})
    found = lengths_of_step.places(lengths.cap, lengths.edges, lengths.logs, np.array(have))
    assert found.at.tolist() == [bisect_left(lengths.edges, length) for length in have]
    table = lengths.table(have)
    assert table == lengths.table_of(np.bincount(found.at, minlength=len(lengths.edges) + 1).tolist())
    present = lengths_of_step.Present(table, have, found)
    assert present.score.tolist() == [table.score(length) for length in have]
    assert present.scores_of(np.array(have)).tolist() == present.score.tolist()


def test_of_nobody_there_is_nothing_to_say() -> None:
    present = lengths_of_step.Present(LengthForecast(100).table(), ())
    assert len(lengths_of_step.expected(present, [])) == len(lengths_of_step.impute(present, [])) == 0
    assert lengths_of_step.beliefs(present, []) == []
