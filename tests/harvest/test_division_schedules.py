"""Random divisions keep shares, floors and caps, and starve nobody; what the harvester makes of them keeps its limits, and engines change
hands with whom they may. Planted bugs are found by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.harvest import division_schedule, hands_schedule
from tests.harvest.division_schedule import DIVISION_PLANTS
from tests.harvest.hands_schedule import HANDS_PLANTS

PLANTS = {
    **{name: (division_schedule.play, *planted) for name, planted in DIVISION_PLANTS.items()},
    **{name: (hands_schedule.play, *planted) for name, planted in HANDS_PLANTS.items()},
}


def divided(seeds: range) -> None:
    fleets = [division_schedule.play(seed) for seed in seeds]
    assert sum(fleet.left for fleet in fleets) > 4 * len(seeds), "engines hardly ever left for another run"
    assert sum(fleet.below for fleet in fleets) > 4 * len(seeds), "runs were hardly ever below their floors"


def harvested(seeds: range) -> None:
    fleets = [hands_schedule.play(seed) for seed in seeds]
    assert sum(fleet.changed for fleet in fleets) > 2 * len(seeds), "engines hardly ever changed hands"
    assert sum(fleet.built for fleet in fleets) > len(seeds) // 4, (
        "engines hardly ever changed to another model"
    )
    assert sum(fleet.left for fleet in fleets) > 4 * len(seeds), "engines hardly ever left"


def test_random_divisions_keep_shares_floors_and_caps_and_starve_nobody() -> None:
    divided(range(10))


def test_random_harvests_keep_their_limits_and_engines_change_hands_with_whom_they_may() -> None:
    harvested(range(10))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("play", [divided, harvested])
@pytest.mark.parametrize("first", range(1_000, 3_000, 500))
def test_many_more_random_fleets_are_divided(play: Callable[[range], None], first: int) -> None:
    play(range(first, first + 500))


@pytest.mark.parametrize("name", PLANTS)
def test_the_schedules_find_a_planted_bug_of_the_division(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play, plant, says, known = PLANTS[name]
    plant(monkeypatch)
    others = []
    for seed in (known, *range(30)):
        try:
            play(seed)
        except AssertionError as failed:
            if re.search(says, str(failed)):
                return
            others.append(str(failed).splitlines()[0])
    pytest.fail(f"{name} was not found by 30 schedules; what they found: {others[:3]}")
