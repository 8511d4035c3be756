"""Random schedules hold every invariant and get every step done; classic bugs are found when they are planted, and made short."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.router import schedule, shrink
from tests.router.blocks import FATES
from tests.router.coverage import EXCUSED, FAULTS, Coverage, excused, faults_missing, illegal, missing
from tests.router.memory_ledger import StoredLedger
from tests.router.plants import PLANTS

OPS = 200
#: Many schedules a test: minutes where other processes take the cores.
pytestmark = pytest.mark.timeout(900)
BATCHES, EACH = 20, 100
REPLAYS = sorted((Path(__file__).parent / "replays").glob("*.json"))


def played(first: int, count: int, cover: Coverage) -> None:
    """Play schedules; a failure is made short and printed as a file for `replays/`."""
    for seed in range(first, first + count):
        try:
            world = schedule.run(seed, OPS, cover)
        except schedule.Failed as failed:
            short = shrink.shrink(failed.log, failed.alone)
            pytest.fail(
                f"{failed}\n{len(failed.log)} ops made {len(short)}:\n{shrink.as_json(short, failed.alone, f'seed {seed}')}"
            )
        assert len(world.log) >= 200


@functools.cache
def batch(number: int) -> Coverage:
    cover = Coverage()
    played(number * EACH, EACH, cover)
    return cover


@pytest.mark.parametrize("number", range(BATCHES))
def test_random_schedules_hold_every_invariant_and_get_every_step_done(number: int) -> None:
    assert batch(number).samples["complete", "end"] >= 5 * EACH, (
        "the schedules hardly trained: they prove nothing"
    )


def test_schedules_reach_every_legal_transition_and_every_fault_in_every_state(
    record_property: Callable[[str, object], None],
) -> None:
    total = Coverage()
    for number in range(BATCHES):
        total.add(batch(number))
    print(total.summary())
    record_property("coverage", total.summary())
    assert illegal(total) == []
    assert total.set_aside > 150, "engines whose numbers are wrong are hardly ever found"
    assert missing(total) == []
    assert faults_missing(total) == []
    assert [fate for fate in (*FATES, "loaded") if total.blocks[fate] < 10] == [], (
        "KV blocks hardly ever move"
    )


def test_what_is_not_demanded_has_its_reason_and_what_is_counted_has_its_table() -> None:
    assert excused().keys() == EXCUSED.keys()
    assert {kind for kind, _ in batch(0).faults} <= FAULTS.keys()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(10_000, 20_000, 1_000))
def test_many_more_schedules_hold_every_invariant(first: int) -> None:
    played(first, 1_000, Coverage())


@pytest.mark.parametrize("seed", range(500, 512))
def test_random_schedules_hold_over_a_real_ledger(seed: int, tmp_path: Path) -> None:
    ledger = StoredLedger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    try:
        schedule.run(seed, OPS, ledger=ledger)
    finally:
        ledger.close()


def test_a_schedule_plays_again_from_its_log() -> None:
    first = schedule.run(11, OPS)
    again = schedule.play(json.loads(json.dumps(first.log)), alone=True)
    rows = {i: (row.state, row.epoch, row.tokens) for i, row in first.truth.ledger.samples.items()}
    assert {i: (row.state, row.epoch, row.tokens) for i, row in again.truth.ledger.samples.items()} == rows
    assert len(rows) > 12


# ---------------------------------------------------------------- planted bugs


def found(name: str, monkeypatch: pytest.MonkeyPatch, seeds: int = 400) -> schedule.Failed:
    """The first schedule that finds a bug for its own reason; what is known to find it is tried first."""
    planted = PLANTS[name]
    others: list[str] = []
    with monkeypatch.context() as patch:
        planted.plant(patch)
        for seed in (*planted.seeds, *range(seeds)):
            try:
                schedule.run(seed, OPS)
            except schedule.Failed as failed:
                if re.search(planted.says, str(failed.cause)):
                    return failed
                others.append(str(failed).splitlines()[0])
    pytest.fail(f"{name} was not found by {seeds} schedules; what they found: {others[:3]}")


@pytest.mark.parametrize("name", PLANTS)
def test_the_schedules_find_a_planted_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found(name, monkeypatch)


@pytest.mark.parametrize(
    "name", ["consumed_twice", "tokens_forgotten_by_a_move", "version_reused_after_a_restart"]
)
def test_a_failing_schedule_is_made_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short log still fails with the bug, in the same way, and passes without it."""
    failed = found(name, monkeypatch)
    with monkeypatch.context() as patch:
        PLANTS[name].plant(patch)
        short = shrink.shrink(failed.log, failed.alone)
        assert len(short) < 30
        assert shrink.failure(short, failed.alone) == shrink.signature(failed.cause)
    schedule.play(short, failed.alone)


@pytest.mark.parametrize("path", REPLAYS, ids=lambda path: path.stem)
def test_a_log_of_a_past_bug_passes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And fails where the bug is planted again, if `plants` has it: the log still shows what it was kept for."""
    kept = json.loads(path.read_text())
    schedule.play(kept["ops"], kept["alone"])
    if kept.get("plant"):
        with monkeypatch.context() as patch:
            PLANTS[kept["plant"]].plant(patch)
            assert shrink.failure(kept["ops"], kept["alone"])


def test_there_are_replays() -> None:
    assert len(REPLAYS) >= 3
