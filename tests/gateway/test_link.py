"""One turn as the daemon sends it: what is added, what is asked for again, and what may not be put together."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path

import pytest
import structlog

from scavenger.errors import AuthError, WireError
from scavenger.gateway.dialects import BadRequest, Piece
from scavenger.gateway.link import Link, TurnStream
from scavenger.protocol import keys, messages

REQUEST = sha256(b"r").digest()


def turn(n: int = 1) -> TurnStream:
    prompt = messages.pack_tokens([1, 2])
    return TurnStream(messages.OpenTurn("e", REQUEST, REQUEST, prompt, n, messages.Sampling(8)))


def tokens(
    sample_id: int,
    offset: int,
    some: list[int],
    *,
    index: int = 0,
    finish: str = "",
    error: str | None = None,
) -> messages.TurnTokens:
    logprobs = messages.pack_logprobs([-1.0] * len(some))
    return messages.TurnTokens(
        REQUEST, sample_id, index, offset, messages.pack_tokens(some), logprobs, logprobs, 1, finish, error
    )


def accepted(turn_id: int, prompt: bytes = b"p") -> messages.TurnAccepted:
    return messages.TurnAccepted(turn_id, 1, False, sha256(prompt).digest(), 2)


async def read(stream: TurnStream) -> list[Piece]:
    return [piece async for piece in stream.pieces(raw=True)]


def test_two_turns_of_one_request_are_not_put_together() -> None:
    stream = turn()
    assert stream.take(tokens(1, 0, [10, 11]))
    assert stream.take(tokens(2, 0, [20, 21, 22], finish="stop"))
    assert list(stream.samples[0].tokens) == [10, 11]
    assert stream.settled
    with pytest.raises(BadRequest, match="ask again") as refused:
        asyncio.run(read(stream))
    assert refused.value.status == 500


def test_nor_are_samples_of_two_turns() -> None:
    stream = turn(2)
    stream.accept(accepted(7))
    assert stream.take(tokens(1, 0, [10], finish="stop"))
    assert stream.take(tokens(4, 0, [20], index=1, finish="stop"))
    assert stream.refused is not None
    assert not stream.samples[1].tokens


def test_a_turn_that_is_begun_anew_before_any_token_goes_on() -> None:
    stream = turn()
    stream.accept(accepted(7))
    stream.accept(accepted(8))
    assert stream.take(tokens(2, 0, [20], finish="stop"))
    assert [list(piece.tokens) for piece in asyncio.run(read(stream))] == [[20]]
    for change in (accepted(9), accepted(9, b"another")):
        stream.accept(change)
        assert stream.refused is not None


def test_a_turn_that_is_given_up_past_what_is_here_is_not_asked_for_again() -> None:
    stream = turn()
    assert stream.take(tokens(1, 0, [10]))
    assert not stream.take(tokens(1, 3, [13])), "a gap"
    assert stream.take(tokens(1, 5, [], error="gone"))
    with pytest.raises(BadRequest, match="gone"):
        asyncio.run(read(stream))


def test_no_fault_of_files_or_frames_ends_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [
        AuthError("others can read it", "chmod"),
        OSError("stale file handle"),
        WireError("no frame", ""),
    ]
    seen: list[int] = []

    def connect() -> None:
        seen.append(len(faults))
        if not faults:
            raise asyncio.CancelledError
        raise faults.pop()

    async def run() -> None:
        link = Link(tmp_path, keys.KeyPair("p", "s"), "r")
        monkeypatch.setattr(link, "_connect", connect)
        with pytest.raises(asyncio.CancelledError):
            await link.run()

    asyncio.run(run())
    assert seen == [3, 2, 1, 0]


def test_a_link_that_ends_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette", reason="the extra `gateway`")
    from scavenger.gateway.app import make_app, withdraw

    async def fail() -> None:
        raise RuntimeError("a fault of ours")

    class Broken:
        link = Link(tmp_path, keys.KeyPair("p", "s"), "r")
        generate = complete = chat = models = client = begin = end = ask_tool = answer_tool = health = None

    monkeypatch.setattr(Broken.link, "run", fail)
    stopped: list[bool] = []

    async def live() -> None:
        app = make_app(Broken(), lambda: stopped.append(True))  # type: ignore[arg-type]
        async with app.router.lifespan_context(app):
            await asyncio.sleep(0.01)
            assert stopped == [True]

    with pytest.raises(RuntimeError, match="ours"):
        asyncio.run(live())
    place = tmp_path / "gateway.host.json"
    place.write_bytes(b"mine")
    withdraw(place, b"another's")
    assert place.exists()
    withdraw(place, b"mine")
    withdraw(place, b"mine")
    assert not place.exists()


NOT_OPENED = messages.Denied("unknown-run", "run 'r' was never opened", "open it first")


def test_a_refusal_that_comes_again_each_second_is_logged_once(tmp_path: Path) -> None:
    link = Link(tmp_path, keys.KeyPair("p", "s"), "r")
    with structlog.testing.capture_logs() as told:
        other = messages.Denied("not-owner", "another's")
        answers: list[messages.ReplyBody] = [NOT_OPENED, other, other, messages.Ok(), NOT_OPENED, NOT_OPENED]
        for number, body in enumerate(answers):
            link._take(messages.Reply(number, body))
    assert [one["cause"] for one in told if one["log_level"] == "warning"] == [
        "another's",
        NOT_OPENED.reason,  # after it was open: the daemon has another ledger
    ]


def test_a_run_that_its_training_job_has_not_opened_yet_is_no_warning(tmp_path: Path) -> None:
    link = Link(tmp_path, keys.KeyPair("p", "s"), "r")
    with structlog.testing.capture_logs() as told:
        answers: list[messages.ReplyBody] = [NOT_OPENED, NOT_OPENED, messages.Ok()]
        for number, body in enumerate(answers):
            link._take(messages.Reply(number, body))
    assert told == [
        {"event": "waiting until the training job opens the run", "run": "r", "log_level": "info"}
    ]


def test_the_end_of_an_episode_is_asked_for_until_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scavenger.gateway.link.ASK_AGAIN_S", 0.01)
    monkeypatch.setattr("scavenger.gateway.link.GIVE_UP_S", 0.2)
    asked: list[object] = []

    async def run() -> None:
        link = Link(tmp_path, keys.KeyPair("p", "s"), "r")

        def call(body: object, future: asyncio.Future[object]) -> None:
            asked.append(body)
            if len(asked) == 3:
                future.set_result(messages.Ok())

        monkeypatch.setattr(link, "_call", call)
        await link.end_episode("e")
        assert asked == [messages.EndEpisode("e")] * 3
        with pytest.raises(BadRequest) as refused:
            await link.end_episode("e")
        assert refused.value.status == 503

    asyncio.run(run())
