"""Random schedules of a fleet: several runs whose engines change hands, a further cluster whose link is cut, guests whose bound falls.

No token, lease, version or group of one run reaches another; each token is accepted once; every step gets done. Planted bugs by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.router import schedule, shrink
from tests.router.coverage import Coverage, illegal
from tests.router.fleet import SAID
from tests.router.fleet_plants import FLEET_PLANTS
from tests.router.memory_ledger import StoredLedger

OPS = 120
EACH = 24
#: What has to happen once in so many schedules, or they prove nothing.
DEMANDED = {
    "link returns, engine there": 4,
    "link returns, engine suspect": 4,
    "link returns, engine given up": 1,
    "bound rises": 1,
    "bound falls to 0, at work": 4,
    "left in mid-sample": 2,
    "lent": 1,
    "a loan ends, its borrower at work": 12,
    "a lender ends, its borrower there": 40,
    **{f"another run's engine: {said}": 8 for said in SAID},
}
pytestmark = pytest.mark.timeout(900)


def played(first: int, count: int) -> Coverage:
    cover = Coverage()
    for seed in range(first, first + count):
        try:
            schedule.run(seed, OPS, cover, ahead=max(0, seed % 4 - 1), in_fleet=True)
        except schedule.Failed as failed:
            pytest.fail(f"{failed}\n{shrink.as_json(failed.log, failed.alone, f'fleet, seed {seed}')}")
    seldom = {
        what: cover.fleet[what] for what, one_in in DEMANDED.items() if cover.fleet[what] * one_in < count
    }
    assert seldom == {}, "this hardly ever happened: the schedules prove nothing of it"
    assert illegal(cover) == []
    return cover


def test_random_fleets_keep_runs_apart_and_get_every_step_done(
    record_property: Callable[[str, object], None],
) -> None:
    cover = played(0, EACH)
    record_property("fleet", dict(cover.fleet))
    assert cover.samples["complete", "end"] >= 5 * EACH, "the schedules hardly trained"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(10_000, 14_000, 1_000))
def test_many_more_random_fleets(first: int) -> None:
    played(first, 1_000)


def test_a_random_fleet_holds_over_a_real_ledger(tmp_path: Path) -> None:
    ledger = StoredLedger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    try:
        schedule.run(500, OPS, ledger=ledger, in_fleet=True)
    finally:
        ledger.close()


def found(name: str, monkeypatch: pytest.MonkeyPatch) -> schedule.Failed:
    """The first schedule that finds a bug for its own reason."""
    planted, others = FLEET_PLANTS[name], []
    with monkeypatch.context() as patch:
        planted.plant(patch)
        for seed in (*planted.seeds, *range(60)):
            try:
                schedule.run(seed, OPS, in_fleet=True)
            except schedule.Failed as failed:
                if re.search(planted.says, str(failed.cause)):
                    return failed
                others.append(str(failed).splitlines()[0])
    pytest.fail(f"{name} was not found by 60 schedules; what they found: {others[:3]}")


@pytest.mark.parametrize("name", FLEET_PLANTS)
def test_the_schedules_find_a_planted_bug_of_a_fleet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found(name, monkeypatch)


def test_a_fleets_schedule_plays_again_from_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = found("group_to_another_owner", monkeypatch)
    schedule.play(failed.log, failed.alone)
    with monkeypatch.context() as patch:
        FLEET_PLANTS["group_to_another_owner"].plant(patch)
        assert shrink.failure(failed.log, failed.alone) == shrink.signature(failed.cause)
