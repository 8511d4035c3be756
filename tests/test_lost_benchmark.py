"""What `benchmarks/lost.py` concludes of notes and ledger, and that an engine notes every token; the `long` test kills."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import lost, lost_witness
from benchmarks.lost_account import Generated, Kill, Turn, account, token_seconds

ONE, OTHER = 11, 12  # engines
NOTICE, NONE, ENVIRONMENT = lost.NOTICE, lost.NO_NOTICE, lost.ENVIRONMENT


def generated(pid: int, start: int, count: int, at: float, stream: str = "a") -> list[Generated]:
    """A token each 0.05 s."""
    return [Generated(at + 0.05 * i, pid, stream, start + i, 1) for i in range(count)]


def turn(durable: int, stream: str = "a", life: int = 0, begun_at: float = 0.0) -> Turn:
    return Turn(stream, "train-1.0.0", life, durable, begun_at)


KILLED = Kill(1, NONE, 10.0, ONE, True, 1)


def losses(made: Sequence[Generated], turns: Sequence[Turn], *kills: Kill) -> list[int]:
    return [loss.tokens for loss in account(made, turns, kills, 100.0).losses]


def test_what_a_killed_engine_generated_and_another_one_did_again_is_its_loss() -> None:
    made = generated(ONE, 0, 10, 9.4) + generated(OTHER, 7, 13, 11.0)
    found = account(made, [turn(20)], [KILLED], 100.0)
    (loss,) = found.losses
    assert (loss.tokens, found.unexplained, found.generated) == (3, 0, 23)
    assert loss.seconds == loss.most_s == pytest.approx(0.15)
    assert losses(generated(ONE, 0, 10, 9.4) + generated(OTHER, 10, 10, 11.0), [turn(20)], KILLED) == [0]


def test_what_never_became_durable_is_lost_though_nobody_generates_it_again() -> None:
    assert losses(generated(ONE, 0, 10, 9.4), [turn(8)], KILLED) == [2]
    assert losses(generated(ONE, 0, 10, 9.4), [], KILLED) == [10], "a turn that the ledger does not have"


def test_what_an_engine_generates_twice_is_charged_to_the_last_kill_before_it() -> None:
    kills = Kill(1, lost.GATEWAY, 5.0, 91), Kill(2, ENVIRONMENT, 10.0, 92), Kill(3, lost.DAEMON, 20.0, 93)
    made = generated(ONE, 0, 10, 9.0) + generated(ONE, 0, 10, 11.0)
    assert losses(made, [turn(10)], *kills) == [0, 10, 0]
    assert account(made, [turn(10)], [], 100.0).unexplained == 10


def test_all_turns_of_a_life_that_another_one_followed_are_lost() -> None:
    kills = Kill(1, NONE, 5.0, ONE, True, 1), Kill(2, ENVIRONMENT, 10.0, 92)
    made = generated(OTHER, 0, 10, 8.0) + generated(OTHER, 0, 10, 12.0, "b")
    assert losses(made, [turn(10), turn(10, "b", 1, 12.0)], *kills) == [0, 10]


def test_what_was_generated_after_the_end_counts_nowhere() -> None:
    found = account(generated(ONE, 0, 10, 99.0), [turn(0)], [KILLED], 99.0)
    assert [loss.tokens for loss in found.losses] == [1]


def test_a_slots_rate_is_that_of_its_own_engine_where_it_is_known() -> None:
    slow = [Generated(0.2 * i, ONE, "a", i, 1) for i in range(9)]
    usual, known = token_seconds([*slow, *generated(OTHER, 0, 3, 0.0)])
    assert usual == pytest.approx(0.2)
    assert known == {ONE: pytest.approx(0.2)}


@pytest.mark.parametrize(
    ("kind", "again", "met"),
    [
        (NOTICE, 0, True),
        (NOTICE, 10, True),  # half a second
        (NOTICE, 20, False),
        (NONE, 2, True),  # 100 ms
        (NONE, 3, False),
        (ENVIRONMENT, 0, True),
        (ENVIRONMENT, 1, False),
    ],
)
def test_the_verdict(kind: str, again: int, met: bool) -> None:
    made = generated(ONE, 0, 30, 8.4) + generated(OTHER, 30 - again, 10, 11.0)
    found = account(made, [turn(40 - again)], [Kill(1, kind, 10.0, ONE, kind != ENVIRONMENT, 1)], 100.0)
    assert found.losses[0].tokens == again
    assert lost.met(kind, found.losses) is met
    assert ("MISSED" in lost.row(kind, found.losses)) is not met


def test_a_reference_engine_notes_every_token_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the engine needs the [trainer] extra")
    from rollout.engines import reference
    from rollout.engines.base import EngineHost
    from scavenger.protocol.messages import SampleKey, Sampling
    from scavenger.protocol.worker.events import Request
    from tests.rollout import models

    for name in ("add", "next"):  # put back after the test
        monkeypatch.setattr(reference.ReferenceEngine, name, getattr(reference.ReferenceEngine, name))
    lost_witness.watch(tmp_path)

    async def generate() -> int:
        engine = await reference.build(models.spec(), EngineHost())
        await engine.load(1, models.views(models.plain_model(models.config_text())))
        count = 0
        for handle, accepted in ((1, ()), (2, (5, 6, 7))):
            how = Sampling(8, temperature=0.0)
            await engine.add(Request(handle, (1, 2), accepted, 8, how, 0, SampleKey("turn", 3, handle, 0)))
        ended: set[int] = set()
        while len(ended) < 2:
            for delta in await engine.next():
                count += len(delta.token_ids)
                ended |= {delta.handle} if delta.finish else set()
        await engine.close()
        return count

    count = asyncio.run(generate())
    found = lost_witness.read(tmp_path)
    assert count == sum(one.count for one in found) > 2
    assert {one.pid for one in found} == {os.getpid()}
    for stream, first in (("turn/3/1/0", 0), ("turn/3/2/0", 3)):
        places = [
            place
            for one in found
            if one.stream == stream
            for place in range(one.start, one.start + one.count)
        ]
        assert places
        assert places == list(range(first, first + len(places)))


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.timeout(1500)
def test_one_kill_of_each_kind_in_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Of an engine without notice a busy machine delays the flush: its figure is the benchmark's, and no test's."""
    lost.main(["--kills", "1", "--turns", "20", "--tokens", "40", "--tool-s", "1"])
    said = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in said.splitlines()[2:7]}
    assert list(rows) == list(lost.KINDS[:5]), said
    assert all("| met |" in line for kind, line in rows.items() if kind != NONE), said
    assert "asked twice: 0; tokens of turns that no step took: 0; lost without a kill at work: 0" in said
