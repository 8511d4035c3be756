"""Many moves at once are logged and folded soon after: what comes of it is what comes of writing each where it belongs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scavenger.errors import LedgerError
from scavenger.ledger import records as r
from scavenger.ledger.read.reader import rows
from scavenger.ledger.schema import move_log
from scavenger.ledger.store import open_engine, upgrade
from scavenger.ledger.write import moves
from scavenger.ledger.write.moves import MoveLog
from scavenger.ledger.write.transaction import Generation, commit_batch, grant_generation, open_connection
from scavenger.ledger.write.writer import WriterState
from tests.ledger.examples import witness

SAMPLES = 300
FOLDED_S = 20.0
TABLES = {
    "samples": "sample_id, epoch, worker_id, moves, regenerated, accepted_len, state",
    "leases": "sample_id, epoch, worker_id, start_len, end_len, regenerated, reason, granted_at, ended_at",
    "move_log": "n",
}


def dump(url: str) -> dict[str, list[tuple[object, ...]]]:
    engine = open_engine(url)
    try:
        return {
            name: [
                tuple(x)
                for x in rows(
                    engine,
                    f"SELECT {columns} FROM {name} ORDER BY 1, 2"
                    if name != "move_log"
                    else f"SELECT {columns} FROM {name}",
                ).rows
            ]
            for name, columns in TABLES.items()
        }
    finally:
        engine.dispose()


def leased(samples: int = SAMPLES) -> list[r.Record]:
    made = r.GroupCreated(1, 1, "train", 1, 0, 0, 1, b"", samples, 1, "{}", "{}", 1.0)
    return [made, *(r.LeaseGranted(s, 1, 9, 1, 0, 1.0) for s in range(1, samples + 1))]


def moved(epoch: int, at: float, length: int = 0, samples: int = SAMPLES) -> list[r.Record]:
    return [
        r.LeaseMoved(s, epoch, "node lost", length, s % 3, 10 + epoch, 1, at) for s in range(1, samples + 1)
    ]


def chunk(sample: int, epoch: int, offset: int) -> r.ChunkAccepted:
    return r.ChunkAccepted(sample, epoch, offset, b"\1\0\0\0", b"\0" * 4, b"\0" * 4, 1, 9, 2.0)


def commit(
    connection: sa.Connection,
    generation: Generation,
    batch: int,
    records: Sequence[r.Record],
    now: float,
    log: MoveLog,
) -> None:
    """As the writer does."""
    plan = log.plan(records, now)
    commit_batch(connection, generation, batch, records, now, plan)
    log.done(plan, now)


def in_place(url: str, submissions: Sequence[Sequence[r.Record]]) -> dict[str, list[tuple[object, ...]]]:
    """What these leave when nothing is logged."""
    upgrade(url)
    engine = open_engine(url)
    generation = grant_generation(engine, "h", 1, "v", 0.0)
    with open_connection(engine) as connection:
        for batch, records in enumerate(submissions, 1):
            commit_batch(connection, generation, batch, records, 1.0)
    engine.dispose()
    return dump(url)


def test_a_move_is_durable_in_the_log_and_folded_when_nobody_writes(url: str, tmp_path: Path) -> None:
    expected = in_place(f"sqlite:///{tmp_path / 'plain.sqlite3'}", [leased(), moved(1, 2.0)])
    upgrade(url)
    with witness(url) as w:
        w.writer.submit(0, leased())
        w.wait_ticket(0)
        w.writer.submit(1, moved(1, 2.0))
        w.wait_ticket(1)
        until = time.monotonic() + FOLDED_S
        while w.writer.logged_moves:
            assert time.monotonic() < until
            time.sleep(0.01)  # polls a condition
        assert w.states == []
    assert dump(url) == expected


def test_what_a_killed_daemon_left_is_folded_by_the_one_that_takes_over(url: str, tmp_path: Path) -> None:
    expected = in_place(
        f"sqlite:///{tmp_path / 'plain.sqlite3'}", [leased(), moved(1, 2.0), moved(2, 3.0, 5)]
    )
    upgrade(url)
    engine = open_engine(url)
    generation, log = grant_generation(engine, "h", 1, "v", 0.0), MoveLog()
    with open_connection(engine) as connection:
        for batch, records in enumerate([leased(), moved(1, 2.0), moved(2, 3.0, 5)], 1):
            commit(connection, generation, batch, records, 1.0, log)
    assert len(log) == 2 * SAMPLES, "the same samples twice, in their order"
    found = dump(url)
    assert found["move_log"] == [(SAMPLES,), (SAMPLES,)]
    assert all(epoch == 1 for _, epoch, *_ in found["leases"]), (
        "until then the tables tell of the moment before"
    )
    grant_generation(engine, "h", 2, "v", 0.0)
    engine.dispose()
    assert dump(url) == expected


@pytest.mark.parametrize(
    "after",
    [
        [chunk(7, 2, 0)],
        [r.LeaseEnded(7, 2, "gone", 0, 0, 3.0)],
        [r.SampleFinished(7, "stop", 0, 3.0)],
        [r.SampleEnded(7, "superseded", "", 0, 0, None, None, 3.0)],
        [r.LeaseMoved(7, 2, "gone", 0, 0, 3, 1, 3.0)],
        [r.ContentsReduced(1, 1, (7,), "dropped", 3.0)],
    ],
    ids=lambda records: type(records[0]).__name__,
)
def test_nothing_that_needs_a_logged_move_is_written_before_it(
    sqlite_url: str, tmp_path: Path, after: list[r.Record]
) -> None:
    before = [
        r.RunCreated(1, "a", "k", 1, "{}", "{}", "", 1.0),
        r.AttemptGranted(1, 1, "h", 0, 0, "{}", "{}", 1.0),
    ]
    history = [[*before, *leased()], moved(1, 2.0), after]
    expected = in_place(f"sqlite:///{tmp_path / 'plain.sqlite3'}", history)
    upgrade(sqlite_url)
    engine = open_engine(sqlite_url)
    generation, log = grant_generation(engine, "h", 1, "v", 0.0), MoveLog()
    with open_connection(engine) as connection:
        for batch, records in enumerate(history, 1):
            commit(connection, generation, batch, records, 1.0, log)
            assert len(log) == (SAMPLES if batch == 2 else 0)
    engine.dispose()
    assert dump(sqlite_url) == expected


def test_what_other_samples_do_does_not_wait_for_a_fold(sqlite_url: str) -> None:
    log = MoveLog()
    log.done(log.plan(moved(1, 2.0), 1.0), 1.0)
    others = [
        chunk(SAMPLES + 1, 1, 0),
        r.GroupCreated(2, 1, "train", 1, 1, 0, 1, b"", 2, 900, "{}", "{}", 1.0),
        r.Event("x", 0, "", "", "{}", 1.0),
    ]
    assert log.plan(others, 1.5) == moves.MovePlan((), others, ())
    assert log.plan(others, 2.5).fold, "not for ever"
    assert log.plan([], 1.1).fold, "nobody writes"
    few = moved(1, 2.0, samples=moves.FEWEST_MOVES - 1)
    assert MoveLog().plan(few, 1.0) == moves.MovePlan((), few, ()), "a fold costs a transaction"
    mixed = [chunk(7, 1, 0), *moved(1, 2.0)]
    assert MoveLog().plan(mixed, 1.0) == moves.MovePlan((), mixed, ()), (
        "the order within the transaction matters"
    )


def test_moves_that_go_on_and_on_are_folded_all_the_same() -> None:
    log = MoveLog()
    for n in range(8):
        plan = log.plan(moved(1 + n, 2.0), float(n))
        assert bool(plan.fold) == (n == 6), n
        log.done(plan, float(n))


def test_a_log_that_holds_what_nobody_logged_is_not_emptied(sqlite_url: str) -> None:
    upgrade(sqlite_url)
    engine = open_engine(sqlite_url)
    generation, log = grant_generation(engine, "h", 1, "v", 0.0), MoveLog()
    with open_connection(engine) as connection:
        commit(connection, generation, 1, leased(), 1.0, log)
        commit(connection, generation, 2, moved(1, 2.0), 1.0, log)
        with connection.begin():
            connection.execute(sa.insert(move_log).values(n=0, moves=b"\x90", at=1.0))
        with pytest.raises(LedgerError, match="move_log held 2 batches"):
            commit(connection, generation, 3, [], 1.0, log)
    assert dump(sqlite_url)["move_log"] == [(SAMPLES,), (0,)]
    engine.dispose()


def test_a_bound_on_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "MOST_MOVES", SAMPLES)
    log = MoveLog()
    for n in range(4):
        plan = log.plan(moved(1 + n, 2.0), 1.0)
        assert bool(plan.fold) == (n == 2), n
        log.done(plan, 1.0)
    assert len(log) == 2 * SAMPLES


def test_a_fold_that_is_tried_again_is_done_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = in_place(
        f"sqlite:///{tmp_path / 'plain.sqlite3'}", [leased(), moved(1, 2.0), [chunk(3, 2, 0)]]
    )
    upgrade(url)
    calls: list[int] = []

    def lossy(*given: Any) -> bool:
        done = commit_batch(*given)
        calls.append(len(calls))
        if len(calls) in (2, 4):  # the commit of the moves, and that of their fold
            raise sa.exc.DBAPIError("COMMIT", None, Exception("gone"), connection_invalidated=True)
        return done

    monkeypatch.setattr("scavenger.ledger.write.writer.commit_batch", lossy)
    with witness(url) as w:
        submissions: list[list[r.Record]] = [leased(), moved(1, 2.0), [chunk(3, 2, 0)]]
        for ticket, records in enumerate(submissions):
            w.writer.submit(ticket, records)
            w.wait_ticket(ticket)
        assert [state for state, _ in w.states] == [WriterState.LOST_CONNECTION, WriterState.OK] * 2
    assert dump(url) == expected


def test_a_log_that_cannot_be_read_stops_the_daemon_with_its_reason(url: str) -> None:
    upgrade(url)
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.insert(move_log).values(n=1, moves=b"\x91\x01", at=1.0))
    with pytest.raises(LedgerError, match="move_log cannot be read"):
        grant_generation(engine, "h", 1, "v", 0.0)
    with engine.begin() as connection:
        connection.execute(sa.update(move_log).values(n=2, moves=b"\x90"))
    with pytest.raises(LedgerError, match="holds 0 moves, not 2"):
        grant_generation(engine, "h", 1, "v", 0.0)
    engine.dispose()


STEP = st.one_of(
    st.tuples(st.just("move"), st.sets(st.integers(1, 6), min_size=1)),
    st.tuples(st.just("chunk"), st.sets(st.integers(1, 6), min_size=1, max_size=2)),
    st.tuples(st.just("finish"), st.sets(st.integers(1, 6), min_size=1, max_size=1)),
    st.tuples(st.just("event"), st.just(set[int]())),
)


def history_of(steps: Sequence[Sequence[tuple[str, set[int]]]]) -> list[list[r.Record]]:
    """Legal records of six samples for steps that may not be: what a sample cannot do it does not."""
    epoch, length, done = dict.fromkeys(range(1, 7), 1), dict.fromkeys(range(1, 7), 0), set[int]()
    history = [leased(6)]
    for submission in steps:
        records: list[r.Record] = []
        for what, chosen in submission:
            for s in sorted(chosen - done):
                if what == "move":
                    records.append(
                        r.LeaseMoved(s, epoch[s], f"gone {epoch[s]}", length[s], s, s + epoch[s], 1, 2.0)
                    )
                    epoch[s] += 1
                elif what == "chunk":
                    records.append(chunk(s, epoch[s], length[s]))
                    length[s] += 1
                else:
                    done.add(s)
                    records += [
                        r.SampleFinished(s, "stop", length[s], 3.0),
                        r.LeaseEnded(s, epoch[s], "finished", length[s], 0, 3.0),
                    ]
            if what == "event":
                records.append(r.Event("x", 0, "", "", "{}", 1.0))
        history.append(records)
    return history


@given(
    steps=st.lists(st.lists(STEP, min_size=1, max_size=3), min_size=1, max_size=8),
    paces=st.lists(st.sampled_from([0.0, 2.0]), min_size=8),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_leaves_the_same_ledger_logged_or_not(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[str, set[int]]]], paces: list[float]
) -> None:
    history = history_of(steps)
    folder = tmp_path_factory.mktemp("moves")
    expected = in_place(f"sqlite:///{folder / 'plain.sqlite3'}", history)
    url = f"sqlite:///{folder / 'logged.sqlite3'}"
    upgrade(url)
    engine = open_engine(url)
    generation, log, now = grant_generation(engine, "h", 1, "v", 0.0), MoveLog(), 0.0
    with pytest.MonkeyPatch.context() as patched, open_connection(engine) as connection:
        patched.setattr(moves, "FEWEST_MOVES", 1)
        for batch, records in enumerate(history, 1):
            now += paces[batch % len(paces)]
            commit(connection, generation, batch, records, now, log)
    grant_generation(engine, "h", 2, "v", 0.0)
    engine.dispose()
    assert dump(url) == expected


def batches_of(url: str, monkeypatch: pytest.MonkeyPatch, *, go: bool) -> tuple[list[int], float]:
    """How many records each transaction took when two engines' samples moved one after the other, and how long that lasted."""
    upgrade(url)
    sizes: list[int] = []

    def sized(
        connection: sa.Connection,
        generation: Generation,
        batch: int,
        records: Sequence[r.Record],
        now: float,
        plan: moves.MovePlan,
    ) -> bool:
        sizes.append(len(records))
        return commit_batch(connection, generation, batch, records, now, plan)

    monkeypatch.setattr("scavenger.ledger.write.writer.commit_batch", sized)
    monkeypatch.setattr("scavenger.ledger.write.writer.GATHER_S", 20.0 if go else 0.01)
    with witness(url) as w:
        w.writer.submit(0, leased())
        w.wait_ticket(0)
        began = time.monotonic()
        for ticket, half in enumerate((range(1, 151), range(151, 301)), 1):
            w.writer.submit(ticket, [r.LeaseMoved(s, 1, "node lost", 0, 0, 9, 1, 2.0) for s in half])
        if go:
            w.writer.go()
        w.wait_ticket(2)
        return [n for n in sizes[1:] if n], time.monotonic() - began


def test_what_was_lost_together_is_one_transaction(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, took = batches_of(sqlite_url, monkeypatch, go=True)
    assert sizes == [SAMPLES]
    assert took < 20, "`go` ends the wait"


def test_moves_that_nobody_calls_complete_wait_for_a_bounded_time(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, _ = batches_of(sqlite_url, monkeypatch, go=False)
    assert sum(sizes) == SAMPLES
