"""Samples of one prompt go to one engine where that changes no engine's number of samples."""

from __future__ import annotations

import random
from collections import Counter

from scavenger.policy.sharing import Placeable, together


def placed(*workers_of_groups: tuple[int, list[int]]) -> list[Placeable]:
    """Of each (group, engines): a sample on each of these engines."""
    found: list[Placeable] = []
    for group, workers in workers_of_groups:
        found += [Placeable(100 * group + place, group, worker) for place, worker in enumerate(workers)]
    return found


def test_two_groups_that_were_spread_over_two_engines_get_one_each() -> None:
    found = together(placed((1, [1, 2, 1, 2]), (2, [1, 2, 1, 2])), {})
    assert found == {100: 1, 101: 1, 102: 1, 103: 1, 200: 2, 201: 2, 202: 2, 203: 2}


def test_a_group_goes_where_some_of_it_is_generated() -> None:
    found = together(placed((1, [1, 2]), (2, [1, 2])), {1: {2: 3}})
    assert (found[100], found[101]) == (2, 2)


def test_a_group_takes_the_place_that_it_just_fills_and_leaves_the_larger_one() -> None:
    found = together(placed((1, [1, 1]), (2, [2, 1])), {})
    assert {found[100], found[101]} == {1}
    found = together(placed((1, [1, 2]), (2, [1, 1, 2])), {})
    assert {found[100], found[101]} == {2}
    assert {found[200], found[201], found[202]} == {1}


def test_no_engine_gets_more_or_fewer_samples_than_its_policy_said() -> None:
    rng = random.Random(5)
    for _ in range(200):
        answers = placed(*[(g, rng.choices((1, 2, 3, 4), k=rng.randint(1, 8))) for g in range(1, 6)])
        found = together(answers, {1: {2: 1}})
        assert found.keys() == {answer.sample_id for answer in answers}
        assert Counter(found.values()) == Counter(answer.worker_id for answer in answers)
