"""A purge and retention at the same time on PostgreSQL: two connections, each in the other's way. (SQLite has one writer at a time.)"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.maintain import purge
from scavenger.ledger.read.reports import check
from scavenger.ledger.write.compaction import reduce_contents
from scavenger.ledger.write.transaction import open_connection
from tests.ledger.conftest import new_database
from tests.ledger.examples import T0, WAIT_S, written
from tests.ledger.histories import ended, fetch, training

pytestmark = pytest.mark.postgres

Work = Callable[[sa.Connection], object]


def purges(connection: sa.Connection) -> object:
    return purge._portion(connection, 1, "sorting", 0)


def compacts(connection: sa.Connection) -> object:
    return reduce_contents(connection, [r.ContentsReduced(1, 1, (101, 102, 201, 202), "compacted", T0 + 100)])


@pytest.fixture
def engine(postgres: sa.URL) -> Iterator[sa.Engine]:
    url = new_database(postgres)
    written(url, [*training(), ended()])
    engine = store.open_engine(url)
    yield engine
    engine.dispose()


def waits_for_a_lock(engine: sa.Engine, pid: int) -> bool:
    with engine.connect() as connection:
        return bool(
            connection.execute(
                sa.text("SELECT cardinality(pg_blocking_pids(:pid)) > 0"), {"pid": pid}
            ).scalar()
        )


def second(engine: sa.Engine, work: Work, pids: list[int], begun: threading.Event) -> None:
    with open_connection(engine) as connection, connection.begin():
        pids.append(int(connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()))
        begun.set()
        work(connection)


@pytest.mark.parametrize(("first", "then"), [(compacts, purges), (purges, compacts)])
def test_whichever_comes_first_a_purge_leaves_nothing(engine: sa.Engine, first: Work, then: Work) -> None:
    """The second begins while the first is not committed, and would else go on from what it read before that."""
    pids: list[int] = []
    begun, give_up = threading.Event(), time.monotonic() + WAIT_S
    with ThreadPoolExecutor(1) as pool:
        with open_connection(engine) as connection, connection.begin():
            first(connection)
            other = pool.submit(second, engine, then, pids, begun)
            assert begun.wait(WAIT_S)
            while not waits_for_a_lock(engine, pids[0]):
                assert not other.done(), other.exception()
                assert time.monotonic() < give_up
        other.result(WAIT_S)
    url = engine.url.render_as_string(hide_password=False)
    payloads = "SELECT max(length(tokens)), max(length(logprobs)) FROM chunks WHERE sample_id IN (101, 102, 201, 202)"
    assert fetch(url, payloads) == [(0, 0)]
    assert fetch(url, "SELECT DISTINCT contents FROM samples WHERE sample_id IN (101, 102, 201, 202)") == [
        ("purged",)
    ]
    purge.purge(url, "sorting")
    assert check(url) == []
