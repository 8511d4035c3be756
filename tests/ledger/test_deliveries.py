"""Deliveries as the ledger has them, in both databases: what a restarted daemon reads, what the check finds, what a purge takes."""

from __future__ import annotations

import sqlalchemy as sa

from scavenger.ledger import store
from scavenger.ledger.maintain import purge
from scavenger.ledger.read import reader
from scavenger.ledger.read.reports import check
from scavenger.protocol.messages import CloseRun
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


def test_a_restarted_daemon_reads_what_is_due_and_what_may_be_due_again(url: str) -> None:
    bench = taken_one_of_two()
    written(url, [bench.ledger.log])
    engine = store.open_readonly(url)
    try:
        found = reader.read_snapshot(engine)
    finally:
        engine.dispose()
    assert found.deliveries == bench.ledger.snapshot().deliveries
    assert [(one.episode, one.state) for one in found.deliveries] == [("e", "consumed"), ("f", "due")]
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
