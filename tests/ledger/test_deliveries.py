"""Deliveries as the ledger has them, in both databases: what a restarted daemon reads, what the check finds, what a purge takes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import sqlalchemy as sa

from scavenger.ledger import store
from scavenger.ledger.maintain import purge
from scavenger.ledger.read import reader
from scavenger.ledger.read.reports import check
from scavenger.protocol.messages import AnswerTool, AskTool, CloseRun
from tests.ledger.examples import written
from tests.router.two_policies import TwoRuns, opened, played


def taken_one_of_two() -> TwoRuns:
    """Two groups are delivered, and a step took the first."""
    bench = opened()
    played(bench, "e", "f")
    bench.deliver(bench.share("e", reward=0.25))
    bench.deliver(bench.share("f", reward=0.75), prompt=1)
    bench.train(1, bench.want()[0])
    return bench


def test_a_restarted_daemon_reads_what_is_due_and_a_resume_what_may_be_due_again(url: str) -> None:
    bench = taken_one_of_two()
    written(url, [bench.ledger.log])
    engine = store.open_readonly(url)
    try:
        found = reader.read_snapshot(engine)
        taken = reader.taken_deliveries(engine, 1, 0, 1 << 20)
        assert reader.taken_deliveries(engine, 1, 1, 1 << 20) == (), "what the kept step took stays taken"
        nbytes = len(taken[0].rows)
        for most, rows in ((nbytes, taken[0].rows), (nbytes - 1, b"")):
            assert [one.rows for one in reader.taken_deliveries(engine, 1, 0, most)] == [rows]
    finally:
        engine.dispose()
    assert found.deliveries == bench.ledger.snapshot().deliveries
    assert taken == bench.ledger.taken_deliveries(1, 0)
    assert [(one.episode, one.state) for one in (*taken, *found.deliveries)] == [
        ("e", "consumed"),
        ("f", "due"),
    ]
    assert found.next_delivery_id == 3
    by_run = {(one.run_id, one.name): bool(one.delivered) for one in found.episodes}
    assert by_run == {(1, "e"): True, (1, "f"): True, (2, "e"): False, (2, "f"): False}
    assert [one for one in check(url) if "without an allocation" not in one] == [], (
        "the bench has no scheduler"
    )


def test_a_turn_of_another_episode_is_found_by_the_check(url: str) -> None:
    written(url, [taken_one_of_two().ledger.log])
    engine = store.open_engine(url)
    try:
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE delivered_turns SET delivery_id = 2 WHERE delivery_id = 1"))
    finally:
        engine.dispose()
    assert any("delivered turns" in found for found in map(str, check(url)))


def test_a_purge_takes_what_a_policy_said_in_another_run_s_episodes(url: str) -> None:
    bench = taken_one_of_two()
    bench.of("s", CloseRun("finished"))
    written(url, [bench.ledger.log])
    purge.purge(url, "s")
    engine = store.open_readonly(url)
    try:
        rows = reader.rows(
            engine, "SELECT length(episode_rows), state, reward FROM deliveries ORDER BY delivery_id"
        ).rows
    finally:
        engine.dispose()
    assert rows == ((0, "consumed", 0.25), (0, "dropped", 0.75))


def test_a_purge_takes_them_in_portions(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's writer waits for no more than one portion, however many a run has; so it is with answers of tools."""
    bench, episodes = opened(), "efghi"
    for episode in episodes:
        played(bench, episode)
    bench.deliver(*(bench.share(one, index) for index, one in enumerate(episodes)))
    for number in range(5):
        asked = AskTool("e", f"{number}.0", "mail.send", b"w" * 16)
        bench.of("s", asked)
        bench.of("s", AnswerTool("e", asked.call, b"sent"))
    bench.of("s", CloseRun("finished"))
    written(url, [bench.ledger.log])
    monkeypatch.setattr(purge, "PORTION_GROUPS", 2)
    patiently, left = purge._patiently, []

    def watched(engine: sa.Engine, work: Callable[[sa.Connection], object]) -> object:
        done = patiently(engine, work)
        with engine.connect() as connection:
            for table, column in (("deliveries", "episode_rows"), ("tool_calls", "answer")):
                kept = sa.text(f"SELECT count(*) FROM {table} WHERE length({column}) > 0")
                left.append((table, connection.execute(kept).scalar_one()))
        return done

    monkeypatch.setattr(purge, "_patiently", watched)
    purge.purge(url, "s")
    for table in ("deliveries", "tool_calls"):
        counts = [count for of, count in left if of == table]
        assert counts[0] == 5, f"{table} are taken with the groups"
        assert counts[-1] == 0
        assert all(before - after <= 2 for before, after in pairwise(counts)), counts
