"""Episodes as the ledger has them, in both databases: prompts made whole again, the view, the report, and what the check finds."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.maintain import purge
from scavenger.ledger.read import prompts, reader, tokens
from scavenger.ledger.read.prompts import TurnPrompt, assemble
from scavenger.ledger.read.reports import check, report
from scavenger.protocol.messages import (
    AskTool,
    CloseRun,
    Denied,
    EndEpisode,
    ToolState,
    pack_tokens,
    unpack_tokens,
)
from scavenger.router.core import turns
from scavenger.router.core.events import JobGone
from scavenger.router.core.prefixes import BLOCK
from tests.ledger.examples import written
from tests.router import harness
from tests.router.harness import Bench, token
from tests.router.memory_ledger import Ledger, StoredLedger
from tests.router.test_prefixes import GATEWAY, Agent

SYSTEM = [7] * (BLOCK + 20)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """Four turns: one, one that goes on and loses its engine, a branch in the first's prompt, and one that is under way."""
    monkeypatch.setattr(harness, "SPEC", msgspec.structs.replace(harness.SPEC, context_length=4096))
    agent = Agent(Ledger())
    bench = agent.bench
    [said] = agent.turn([*SYSTEM, 1])
    bench.tick(2.0)
    agent.ask([*SYSTEM, 1, *said, 2])
    [lease] = bench.leases(agent.conn)
    bench.tick(1.0)
    bench.chunk(agent.conn, lease, 0, 3)
    lost = agent.conn
    agent.join()
    bench.handle(JobGone(f"job{lost}", 0, "preempted", crashed=False))
    [moved] = bench.leases(agent.conn)
    bench.chunk(agent.conn, moved, 3, 5)
    agent.turn([*SYSTEM, 3], n=2)
    agent.ask([*SYSTEM, 1, *said, 2, *(token(moved.sample_id, i) for i in range(8)), 4])
    [last] = bench.leases(agent.conn)
    bench.chunk(agent.conn, last, 0, 3)
    return agent


def rows(url: str, sql: str) -> list[tuple[Any, ...]]:
    engine = store.open_readonly(url)
    try:
        return list(reader.rows(engine, sql).rows)
    finally:
        engine.dispose()


def spoil(url: str, sql: str) -> None:
    engine = store.open_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text(sql))
    engine.dispose()


def wrong_with_turns(url: str) -> list[str]:
    """What the check says of turns and prompts. (The bench has workers without jobs, of which it says something too.)"""
    return [line for line in check(url) if any(word in line for word in ("turn", "prompt"))]


def test_whole_prompts_come_back(url: str, played: Agent) -> None:
    written(url, [played.bench.ledger.log])
    engine = store.open_readonly(url)
    ids = sorted(played.bench.ledger.turns)
    with reader.reading(engine) as connection:
        found = prompts.whole_prompts(connection, ids)
    assert found == {i: played.bench.ledger.prompt(i) for i in ids}
    snapshot = reader.read_snapshot(engine)
    engine.dispose()
    expected = played.bench.ledger.snapshot()
    assert [g.created.prompt for g in snapshot.groups] == [g.created.prompt for g in expected.groups]
    assert [bool(g.created.prompt) for g in snapshot.groups] == [False, False, False, True]
    assert (snapshot.turns, snapshot.turn_samples) == (expected.turns, expected.turn_samples)
    assert snapshot.turn_tokens == expected.turn_tokens != ()
    assert wrong_with_turns(url) == []
    shown = json.loads(tokens.show(url, 2, "json"))
    assert shown["prompt"] == list(unpack_tokens(found[2]))
    stored = [
        unpack_tokens(bytes(row[0])) for row in rows(url, "SELECT prompt FROM groups ORDER BY group_id")
    ]
    assert [len(prompt) for prompt in stored] == [len(SYSTEM) + 1, 1, 21, 1]


@pytest.mark.postgres
def test_the_view_of_decoded_tokens_has_whole_prompts(request: pytest.FixtureRequest, played: Agent) -> None:
    from tests.ledger.conftest import new_database

    url = new_database(request.getfixturevalue("postgres"))
    written(url, [played.bench.ledger.log])
    found = rows(url, "SELECT group_id, prompt FROM v_sample_tokens ORDER BY sample_id")
    assert len(found) == 5
    for group_id, prompt in found:
        assert prompt == list(unpack_tokens(played.bench.ledger.prompt(group_id)))


@pytest.mark.parametrize("most", [65_536, 2])
def test_a_run_that_is_opened_again_after_a_restart_begins_no_episode_of_an_old_name(
    url: str, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Its tools would be asked twice. So many names are kept at most, the newest."""
    monkeypatch.setattr(turns, "MAX_ENDED_EPISODES", most)
    bench = Bench()
    bench.ledger = ledger = StoredLedger(url)
    bench.open()
    bench.publish()
    tool = AskTool("one", "0.ab.0", "mail.send", b"1" * 16)
    assert bench.call(tool, conn=GATEWAY, attempt=0) == ToolState("new")
    for name in ("one", "two"):
        bench.call(EndEpisode(name), conn=GATEWAY, attempt=0)
    assert bench.call(msgspec.structs.replace(tool, episode="three"), conn=GATEWAY, attempt=0) == ToolState(
        "new"
    )
    bench.call(CloseRun("failed"))
    bench.restart()
    bench.open()
    bench.publish(2)
    ended = bench.router.core.runs["r"].turns.ended
    assert list(ended) == ["one", "two", "three"][-most:]
    for name in ended:
        denied = bench.call(
            msgspec.structs.replace(tool, episode=name, asker=b"2" * 16), conn=GATEWAY, attempt=0
        )
        assert isinstance(denied, Denied)
        assert denied.code == "ended"
    assert bench.call(msgspec.structs.replace(tool, episode="four"), conn=GATEWAY, attempt=0) == ToolState(
        "new"
    )
    ledger.close()


def test_an_episode_is_told_turn_by_turn(url: str, played: Agent) -> None:
    played.bench.call(EndEpisode("e"), conn=GATEWAY, attempt=0)
    written(url, [played.bench.ledger.log])
    found = json.loads(report(url, "episodes", "json"))["rows"]
    first = len(SYSTEM) + 1
    assert [
        (t["turn"], t["choice"], t["how"], t["after"], t["prompt_tokens"], t["added_tokens"]) for t in found
    ] == [
        (1, 0, "begins", None, first, first),
        (2, 0, "goes on", 1, first + 9, 1),
        (3, 0, "branches", 1, first, 21),
        (3, 1, "branches", 1, first, 21),
        (4, 0, "goes on", 2, first + 18, 1),
    ]
    assert [(t["completion_tokens"], t["state"], t["engines"], t["moves"]) for t in found] == [
        (8, "served", 1, 0),
        (8, "served", 2, 1),
        (8, "served", 1, 0),
        (8, "served", 1, 0),
        (3, "surplus", 1, 0),
    ]
    second = found[1]
    assert (second["between_s"], second["queue_s"], second["model_s"]) == (2, 0, 1)
    assert {t["episode_state"] for t in found} == {"ended"}
    assert (found[0]["between_s"], found[4]["model_s"]) == (None, None)
    [groups] = rows(url, "SELECT sum(prompt_tokens) FROM v_groups")
    assert groups == (first + first + 9 + first + first + 18,), "the whole prompts"


def test_a_turn_that_branches_or_begins_anew_tells_the_seconds_since_the_turn_that_ended_before_it(
    url: str,
) -> None:
    agent = Agent(Ledger())
    bench = agent.bench
    for seconds, prompt in ((0.0, [1, 2]), (1.0, [1, 2, 3]), (2.0, [4])):
        bench.tick(seconds)
        agent.turn(prompt)
    bench.tick(1.0)
    agent.ask([1, 2, 5])
    bench.tick(0.5)
    agent.ask([1, 2, 6])  # while the one before it is under way
    for lease in bench.leases(agent.conn):
        bench.chunk(agent.conn, lease, 0, 8)
    bench.tick(1.0)
    elsewhere = msgspec.structs.replace(agent.body([1, 2, 3], 1, 8), episode="another")
    bench.call(elsewhere, conn=GATEWAY, attempt=0)
    written(url, [bench.ledger.log])
    found = json.loads(report(url, "episodes", "json"))["rows"]
    assert [(t["how"], t["between_s"]) for t in found] == [
        ("begins", None),
        ("branches", 1),
        ("begins anew", 2),
        ("branches", 1),
        ("branches", 1.5),
        ("begins", None),
    ]


def test_episodes_that_ended_without_a_use_are_reported_with_their_reason_and_cost(
    url: str, played: Agent
) -> None:
    bench = played.bench
    bench.call(EndEpisode("e"), conn=GATEWAY, attempt=0)  # its whole turns were answered
    bench.call(EndEpisode("never asked"), conn=GATEWAY, attempt=0)
    written(url, [bench.ledger.log])
    assert json.loads(report(url, "lost_episodes", "json"))["rows"] == []
    spoil(url, "UPDATE samples SET state = 'surplus' WHERE run_id = 1")
    spoil(url, "UPDATE episodes SET reason = 'the task failed' WHERE name = 'e'")
    [lost] = json.loads(report(url, "lost_episodes", "json"))["rows"]
    assert (lost["run"], lost["state"], lost["reason"], lost["one_of_them"]) == (
        "r",
        "ended",
        "the task failed",
        "e",
    )
    assert (lost["episodes"], lost["turns"], lost["tokens"]) == (1, 4, 35)


def test_an_episode_that_its_run_s_end_cut_off_is_lost_though_a_turn_was_answered(
    url: str, played: Agent
) -> None:
    played.bench.call(CloseRun("failed"))
    written(url, [played.bench.ledger.log])
    [lost] = json.loads(report(url, "lost_episodes", "json"))["rows"]
    assert (lost["state"], lost["turns"]) == ("stopped", 4)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ("UPDATE turns SET parent_id = 4 WHERE number = 2", "no sample of an earlier turn"),
        ("UPDATE turns SET prefix_len = 4000 WHERE number = 2", "share more with their parent"),
        ("UPDATE turns SET prompt_tokens = 3 WHERE number = 2", "another length"),
        ("DELETE FROM samples WHERE sample_id = 1", "sequences of turns without their sample"),
    ],
)
def test_the_check_finds_what_does_not_join(url: str, played: Agent, damage: str, what: str) -> None:
    written(url, [played.bench.ledger.log])
    spoil(url, damage)
    assert any(what in line for line in check(url)), check(url)


def test_a_prompt_that_is_not_what_it_was_generated_from_is_refused(url: str, played: Agent) -> None:
    written(url, [played.bench.ledger.log])
    wrong = bytes(reversed(pack_tokens([token(1, i) for i in range(4)])))
    engine = store.open_engine(url)
    with engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE chunks SET tokens = :t WHERE sample_id = 1 AND start_len = 0"), {"t": wrong}
        )
    with pytest.raises(LedgerError, match=r"turn 4.*not what it was generated from"):
        reader.read_snapshot(engine)
    engine.dispose()
    with pytest.raises(LedgerError, match="turn 2"):
        tokens.show(url, 2, "json")


def test_a_purge_takes_digests_too(url: str, played: Agent) -> None:
    played.bench.call(CloseRun("finished"))
    written(url, [played.bench.ledger.log])
    purge.purge(url, "r")
    assert rows(url, "SELECT count(*) FROM turn_samples") == [(0,)]
    assert {len(bytes(row[0])) for row in rows(url, "SELECT prompt_sha256 FROM turns")} == {0}
    assert wrong_with_turns(url) == []
    [(prompt_tokens,)] = rows(url, "SELECT prompt_tokens FROM v_groups WHERE group_id = 2")
    assert prompt_tokens == len(SYSTEM) + 10


def test_a_walk_that_does_not_lead_back_is_refused() -> None:
    """Damaged rows must not keep a daemon in a loop."""
    turn = TurnPrompt(2, 5, 2, 3, 4, b"", pack_tokens([1]))
    with pytest.raises(LedgerError, match="no sample of an earlier turn"):
        assemble(2, {2: turn}, {})
    with pytest.raises(LedgerError, match="no sample of an earlier turn"):
        assemble(2, {2: turn._replace(parent_group=1)}, {})


def test_a_chain_longer_than_one_statement_names(url: str) -> None:
    log: list[r.Record] = []
    agent = Agent(Ledger())
    prompt = [1, 2]
    for _ in range(5):
        prompt = [*prompt, *agent.turn(prompt, most=4)[0]]
    log += agent.bench.ledger.log
    written(url, [log])
    engine = store.open_readonly(url)
    with pytest.MonkeyPatch.context() as patch, reader.reading(engine) as connection:
        patch.setattr(prompts, "_MOST_NAMED", 2)
        found = prompts.whole_prompts(connection, sorted(agent.bench.ledger.turns))
    engine.dispose()
    assert found[5] == pack_tokens(prompt[:-4])
