"""Tools with effects outside: durable before they are asked, asked once, and answered from the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.protocol.messages import (
    MAX_ANSWER_BYTES,
    AnswerTool,
    AskTool,
    Denied,
    EndEpisode,
    OpenTurn,
    Reply,
    ReplyBody,
    ToolState,
)
from scavenger.router.core import tools
from scavenger.router.core.state import ToolCall
from scavenger.router.core.transitions import IllegalTransition, ToolStep
from tests.router.harness import Bench
from tests.router.memory_ledger import StoredLedger
from tests.router.test_turns import GATEWAY, opened

FIRST, SECOND = b"1" * 16, b"2" * 16


def call(
    bench: Bench, body: AskTool | AnswerTool | EndEpisode | OpenTurn, conn: int = GATEWAY
) -> ReplyBody | None:
    return bench.call(body, conn=conn, attempt=0)


def replies(bench: Bench) -> list[ReplyBody]:
    return [mail.body for mail in bench.mail.get(GATEWAY, []) if isinstance(mail, Reply)]


def ask(name: str = "0.ab.0", asker: bytes = FIRST, episode: str = "e") -> AskTool:
    return AskTool(episode, name, "mail.send", asker)


def answer(text: bytes = b"sent", name: str = "0.ab.0", episode: str = "e") -> AnswerTool:
    return AnswerTool(episode, name, text)


def test_a_tool_is_asked_once_and_its_answer_is_every_life_s() -> None:
    bench = opened()
    assert call(bench, ask()) == ToolState("new")
    assert call(bench, ask()) == ToolState("new"), "the same life: its reply may have been lost"
    assert call(bench, answer()) == ToolState("answered", b"sent")
    for asker in (FIRST, SECOND):
        assert call(bench, ask(asker=asker)) == ToolState("answered", b"sent")
    assert [(c.call, c.answer) for c in bench.ledger.tool_calls.values()] == [("0.ab.0", b"sent")]


def test_nobody_is_told_to_ask_and_no_answer_is_shown_before_it_is_durable() -> None:
    bench = opened(auto=False)
    assert call(bench, ask()) is None
    bench.commit()
    assert replies(bench)[-1] == ToolState("new")
    assert call(bench, answer()) is None
    assert call(bench, ask(asker=SECOND)) is None, "another life learns of it once it is durable"
    bench.commit()
    assert replies(bench)[-2:] == [ToolState("answered", b"sent")] * 2


def test_a_call_that_nobody_answered_is_not_asked_by_another_life() -> None:
    bench = opened()
    call(bench, ask())
    bench.restart()
    assert call(bench, ask(asker=FIRST)) == ToolState("new")
    assert call(bench, ask(asker=SECOND)) == ToolState("open")
    assert [e.kind for e in bench.ledger.events if e.kind.startswith("tool")] == ["tool_call_in_doubt"]
    assert call(bench, answer(b"late")) == ToolState("answered", b"late"), "a late answer is an answer"
    assert call(bench, ask(asker=SECOND)) == ToolState("answered", b"late")


def test_the_first_answer_stays() -> None:
    bench = opened()
    call(bench, ask())
    call(bench, answer(b"one"))
    assert call(bench, answer(b"one")) == ToolState("answered", b"one")
    assert call(bench, answer(b"other")) == ToolState("answered", b"one")
    events = [(e.kind, e.reason) for e in bench.ledger.events if e.kind.startswith("tool")]
    assert len(events) == 1
    assert events[0][0] == "tool_answer_differs"
    assert "recorded answer stays" in events[0][1]


def test_a_restarted_daemon_has_the_answers(tmp_path: Path) -> None:
    bench = Bench()
    bench.ledger = StoredLedger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    bench.open()
    bench.publish()
    call(bench, ask())
    call(bench, answer(b"sent"))
    call(bench, ask("0.ab.1"))
    bench.restart()
    assert call(bench, ask(asker=SECOND)) == ToolState("answered", b"sent")
    assert call(bench, ask("0.ab.1", asker=SECOND)) == ToolState("open")
    assert call(bench, ask("0.ab.2")) == ToolState("new")
    assert sorted(bench.ledger.tool_calls) == [1, 2, 3]
    bench.ledger.close()


def test_an_ended_episode_asks_nothing() -> None:
    bench = opened()
    call(bench, ask())
    call(bench, answer())
    call(bench, EndEpisode("e"))
    for body in (ask(), ask("0.ab.1"), answer()):
        refused = call(bench, body)
        assert isinstance(refused, Denied)
        assert refused.code == "ended"
    assert call(bench, ask(episode="f")) == ToolState("new"), "another episode has calls of its own"


def test_what_was_not_asked_has_no_answer() -> None:
    refused = call(opened(), answer())
    assert isinstance(refused, Denied)
    assert refused.code == "invalid"


def test_what_is_kept_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MAX_EPISODE_CALLS", 2)
    monkeypatch.setattr(tools, "MAX_ANSWER_BYTES", 8)
    bench = opened()
    call(bench, ask("a"))
    call(bench, answer(b"12345678", "a"))
    refused = call(bench, ask("b"))
    assert isinstance(refused, Denied)
    assert refused.code == "full"
    call(bench, EndEpisode("e"))
    assert call(bench, ask("b", episode="f")) == ToolState("new")
    call(bench, ask("c", episode="f"))
    refused = call(bench, ask("d", episode="f"))
    assert isinstance(refused, Denied)
    assert refused.code == "full"


def test_an_episode_whose_tools_say_too_much_stops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MAX_EPISODE_ANSWER_BYTES", 8)
    bench = opened()
    for name in "abc":
        assert call(bench, ask(name)) == ToolState("new")
    for name in "abc":
        assert call(bench, answer(b"12345678", name)) == ToolState("answered", b"12345678"), "it was asked"
    refused = call(bench, ask("d"))
    assert isinstance(refused, Denied)
    assert refused.code == "full"
    assert call(bench, answer(b"12345678", "a")) == ToolState("answered", b"12345678"), "repeated"
    assert call(bench, ask("a", episode="f")) == ToolState("new"), "another one goes on"
    assert call(bench, answer(b"12345678", "a", episode="f")) == ToolState("answered", b"12345678")


def test_what_answers_may_come_to_is_bounded_before_their_tools_are_asked() -> None:
    bench = opened()
    most = b"1" * MAX_ANSWER_BYTES
    for number in range(tools.MAX_EPISODE_ANSWER_BYTES // MAX_ANSWER_BYTES - 1):
        call(bench, ask(f"kept{number}"))
        call(bench, answer(most, f"kept{number}"))
    names = [f"late{number}" for number in range(tools.MAX_UNANSWERED_CALLS)]
    assert [call(bench, ask(name)) for name in names] == [ToolState("new")] * len(names)
    refused = call(bench, ask("more"))
    assert isinstance(refused, Denied)
    assert (refused.code, refused.remedy) == ("full", "ask again when one has")
    assert call(bench, ask(names[0])) == ToolState("new"), "asked for again"
    assert call(bench, ask("a", episode="f")) == ToolState("new"), "another one goes on"
    assert call(bench, answer(b"1", names[0])) == ToolState("answered", b"1")
    assert call(bench, ask("more")) == ToolState("new"), "there is a place again"
    for name in [*names[1:], "more"]:
        assert call(bench, answer(most, name)) == ToolState("answered", most), "no tool was asked in vain"
    held = sum(len(kept.answer) for kept in bench.ledger.tool_calls.values() if kept.answer)
    assert held <= tools.MAX_EPISODE_ANSWER_BYTES + tools.MAX_UNANSWERED_CALLS * MAX_ANSWER_BYTES


def test_an_answer_cannot_be_replaced() -> None:
    one = ToolCall(1, "t", FIRST)
    one.transition(ToolStep.ASK)
    one.transition(ToolStep.ANSWER)
    for step in ToolStep:
        with pytest.raises(IllegalTransition):
            one.transition(step)
