"""The daemon's task that applies retention: in a real daemon, and what it waits for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from scavenger.config import DaemonConfig
from scavenger.daemon.main import Daemon
from scavenger.daemon.takeover import Manner
from scavenger.errors import DaemonUnavailable
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.maintain import keeper as keepers
from scavenger.ledger.maintain.keeper import QUIET_BYTES, Keeper
from scavenger.ledger.read.reports import check
from scavenger.ledger.retention import Policy
from scavenger.protocol import keys
from scavenger.protocol.messages import EngineSpec
from tests.ledger.examples import T0, WAIT_S, Witness, witness, written
from tests.ledger.histories import fetch, training

ENGINE = msgspec.json.encode(EngineSpec("reference", "{}", "float32", 4, 64)).decode()


def restorable() -> list[list[r.Record]]:
    """The history with an engine that a daemon can read back."""
    return [
        [
            msgspec.structs.replace(x, engine=ENGINE)
            if isinstance(x, (r.RunCreated, r.AttemptGranted))
            else x
            for x in records
        ]
        for records in training()
    ]


def served(state_dir: Path) -> bool:
    try:
        return keys.read_rendezvous(state_dir).pid > 0
    except DaemonUnavailable:
        return False


@pytest.mark.parametrize(("retention", "became"), [("keep", 0), ("compact", 5), ("drop", 5)])
def test_a_daemon_applies_its_policy(
    tmp_path: Path, retention: str, became: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "CHECK_INTERVAL_S", 0.05)
    state_dir = tmp_path / "state"
    keys.init_state(state_dir, "owner")
    config = DaemonConfig.model_validate(
        {
            "daemon": {"state_dir": state_dir},
            "ledger": {"retention": retention, "retention_steps": 1},
            "harvest": {"enabled": False},
        }
    )
    written(config.ledger_url, restorable())
    reduced = "SELECT count(*) FROM samples WHERE contents IS NOT NULL"

    async def live() -> None:
        daemon = Daemon(config, None, Manner.TAKE_OVER)
        serving = asyncio.create_task(daemon.run())
        async with asyncio.timeout(WAIT_S):
            while not served(state_dir) or (await asyncio.to_thread(fetch, config.ledger_url, reduced)) != [
                (became,)
            ]:
                assert not serving.done(), await serving
                await asyncio.sleep(0.02)
        daemon.stop.set()
        await serving

    asyncio.run(live())
    assert check(config.ledger_url) == []
    (payloads,) = fetch(
        config.ledger_url, "SELECT count(*) FROM chunks WHERE length(tokens) = 0 AND sample_id < 300"
    )
    assert payloads == ((6,) if retention == "drop" else (0,))


class Kept:
    """A keeper whose portions `witnessed` commits; `looked()` lets it look once and gives the statements that it put to the ledger."""

    def __init__(self, url: str, policy: Policy, witnessed: Witness, tickets: Iterator[int]) -> None:
        self.engine = store.open_readonly(url)
        self.committed: list[r.Record] = []
        self._asked: list[str] = []
        self._tickets = tickets
        self._witnessed = witnessed
        sa.event.listen(
            self.engine,
            "before_cursor_execute",
            lambda c, cursor, statement, *more: self._asked.append(statement),
        )
        self.keeper = Keeper(
            self.engine, policy, commit=self._commit, backlog_bytes=lambda: 0, clock=lambda: T0
        )

    async def _commit(self, records: Sequence[r.Record]) -> None:
        ticket = next(self._tickets)
        self.committed += records
        self._witnessed.writer.submit(ticket, records)
        await asyncio.to_thread(self._witnessed.wait_ticket, ticket)

    def looked(self) -> list[str]:
        self._asked.clear()
        asyncio.run(self.keeper.poll())
        return list(self._asked)


def scans(statements: Sequence[str]) -> list[str]:
    return [statement for statement in statements if re.search(r"\b(groups|samples|chunks)\b", statement)]


@pytest.fixture
def kept(url: str) -> Iterator[Callable[[Policy], Kept]]:
    """Makes keepers of a ledger with a history."""
    written(url, training())
    made: list[Kept] = []
    tickets = count(10_000)
    with witness(url) as witnessed:

        def make(policy: Policy) -> Kept:
            made.append(Kept(url, policy, witnessed, tickets))
            return made[-1]

        yield make
    for one in made:
        one.engine.dispose()


def test_a_keeper_with_nothing_to_do_asks_for_no_sample(kept: Callable[[Policy], Kept]) -> None:
    """Not while the run's bound stays where it is."""
    keeper = kept(Policy("compact", 0))
    assert scans(keeper.looked())
    done = len(keeper.committed)
    assert done > 0
    for _ in range(3):
        assert scans(keeper.looked()) == []
    assert len(keeper.committed) == done


def test_a_restarted_keeper_begins_where_contents_are(kept: Callable[[Policy], Kept]) -> None:
    """Steps whose contents are as the policy wants them cost one question together, and not one or two each."""
    first = kept(Policy("drop", 3))  # up to step 2
    assert len(scans(first.looked())) > 3
    again = kept(Policy("drop", 3))
    assert len(scans(again.looked())) == 1
    assert scans(again.looked()) == [], (
        "nothing below the bound was found: that is no reason to look there again"
    )
    assert again.committed == []
    further = kept(Policy("compact", 2))  # what is dropped stays so
    assert len(scans(further.looked())) == 1
    assert further.committed == []


def test_a_policy_that_drops_goes_on_from_what_another_compacted(kept: Callable[[Policy], Kept]) -> None:
    kept(Policy("compact", 0)).looked()
    dropping = kept(Policy("drop", 0))
    dropping.looked()
    assert dropping.committed
    assert {record.to for record in dropping.committed if isinstance(record, r.ContentsReduced)} == {
        "dropped"
    }


def test_the_writer_s_own_work_goes_first(sqlite_url: str) -> None:
    written(sqlite_url, training())
    backlogs = [QUIET_BYTES + 1, QUIET_BYTES + 1, 0]
    seen: list[int] = []

    def backlog_bytes() -> int:
        seen.append(backlogs[min(len(seen), 2)])
        return seen[-1]

    async def commit(records: Sequence[r.Record]) -> None:
        assert seen[-1] == 0
        raise EndOfTest

    class EndOfTest(Exception):
        pass

    engine = store.open_readonly(sqlite_url)
    keeper = Keeper(
        engine, Policy("compact", 0), commit=commit, backlog_bytes=backlog_bytes, clock=lambda: T0
    )
    with pytest.raises(EndOfTest):
        asyncio.run(keeper.poll())
    engine.dispose()
    assert len(seen) == 3


def test_a_ledger_that_cannot_be_read_is_looked_at_again(
    sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without tables the read fails; once they are there the next look goes through."""
    store.open_engine(sqlite_url).dispose()
    engine = store.open_readonly(sqlite_url)

    async def commit(records: Sequence[r.Record]) -> None:
        raise AssertionError(records)

    async def live() -> None:
        keeper = Keeper(
            engine,
            Policy("compact", 0),
            commit=commit,
            backlog_bytes=lambda: 0,
            clock=lambda: T0,
            check_interval_s=0.01,
        )
        stop = asyncio.Event()
        running = asyncio.create_task(keeper.run(stop))
        async with asyncio.timeout(WAIT_S):
            while "retention waits" not in capsys.readouterr().out:
                await asyncio.sleep(0.01)
        assert not running.done()
        stop.set()
        await running

    asyncio.run(live())
    engine.dispose()


def test_a_history_is_read_only_once_the_attempt_that_asks_for_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention and purges look at the run's attempt and state: from that commit on they leave alone what is about to be read."""
    order: list[str] = []

    class Committing:
        async def commit(self, records: Sequence[r.Record]) -> None:
            await asyncio.sleep(0)
            order.append("durable")

    monkeypatch.setattr("scavenger.ledger.read.reader.replay_groups", lambda *_: order.append("read") or ())
    daemon = Daemon(DaemonConfig.model_validate({"daemon": {"state_dir": tmp_path}}), None)
    daemon.server, daemon._engine = Committing(), None  # type: ignore[assignment]
    assert asyncio.run(daemon._read_replay_groups(1, 0)) == ()
    assert order == ["durable", "read"]
