"""Records become few batches, in an order with the same result."""

from __future__ import annotations

import random

import pytest

from scavenger import resources
from scavenger.errors import LedgerError
from scavenger.ledger import records as r
from scavenger.ledger.write import sql_page
from scavenger.ledger.write.batches import BARRIERS, arrange
from scavenger.ledger.write.statements import KINDS, parameters
from scavenger.ledger.write.writer import weigh
from tests.ledger.examples import chunk, everything, group


def kinds() -> set[type[r.Record]]:
    """Every kind of record that exists, whether or not `KINDS` knows it."""
    return {
        kind
        for kind in vars(r).values()
        if isinstance(kind, type) and issubclass(kind, r.Record) and kind is not r.Record
    }


def test_the_page_of_statements_is_the_generated_one() -> None:
    assert sql_page.page() == resources.text("sql/ledger/writes.sql"), (
        "run: python -m scavenger.ledger.write.sql_page > sql/ledger/writes.sql"
    )


def test_every_kind_of_record_has_its_statements() -> None:
    assert set(KINDS) == kinds()
    shown = {type(record) for submission in everything() for record in submission}
    assert shown == kinds(), "the examples show every kind"


def test_records_of_a_kind_keep_their_order_and_none_overtakes_its_barrier() -> None:
    rng = random.Random(5)
    records = [record for submission in everything() for record in submission]
    for _ in range(200):
        rng.shuffle(records)
        batches = arrange(records)
        place = {id(record): n for n, (_, batch) in enumerate(batches) for record in batch}
        assert len(place) == len(records)
        for kind in KINDS:
            same = [record for record in records if type(record) is kind]
            assert [record for k, batch in batches if k is kind for record in batch] == same
        for n, later in enumerate(records):
            for earlier in records[:n]:
                if type(earlier) in BARRIERS[type(later)]:
                    assert place[id(earlier)] < place[id(later)]


def test_a_steady_stream_becomes_a_handful_of_batches() -> None:
    records: list[r.Record] = []
    for n in range(100):
        records += [
            group(n, n * 10, 2, 1, 1),
            r.LeaseGranted(n * 10, 1, 1, 1, 0, 0.0),
            chunk(n * 10, 1, 0, 3, 1),
            r.LeaseEnded(n * 10, 1, "finished", 3, 0, 0.0),
            r.SampleFinished(n * 10, "stop", 3, 0.0),
            r.Decision("p", "a", "s", "r", "{}", 0.0),
        ]
    assert [kind.__name__ for kind, _ in arrange(records)] == [
        "GroupCreated",
        "LeaseGranted",
        "ChunkAccepted",
        "LeaseEnded",
        "SampleFinished",
        "Decision",
    ]


def test_an_end_and_a_reopening_keep_their_order() -> None:
    ended, reopened = r.SampleEnded(1, "consumed", "", 1, 1, 1.0, 1.0, 0.0), r.SampleReopened(1, 2, 0.0)
    assert [record for _, batch in arrange([ended, reopened, ended]) for record in batch] == [
        ended,
        reopened,
        ended,
    ]


def test_text_from_a_peer_cannot_hold_what_postgres_refuses() -> None:
    assert parameters(r.Event("k", 0, "s", "a\0b", "{}", 0.0))["p_reason"] == "a\ufffdb"


def test_an_integer_that_no_column_holds_is_refused_when_it_is_submitted() -> None:
    with pytest.raises(LedgerError, match=r"JobSubmitted\.job_id"):
        weigh(r.JobSubmitted("i", 2**63, 0.0))
