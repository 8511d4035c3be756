"""Agents' calls through the relay to a real gateway and daemon: names, recorded answers, and an environment that answers otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx2
import pytest

from scavenger.gateway import identity
from tests.gateway.conftest import SECRET, LiveGateway, worker
from tests.gateway.conftest import live as live  # the fixture
from trainer.episodes.naming import Setting
from trainer.episodes.relay import Playing, Relay, version_of

T = TypeVar("T")
SAMPLING = {"max_tokens": 8, "logprobs": 1, "routed_experts_prompt_start": 0}


class Life:
    """One life of an environment: a relay of its own, as a worker has, and an agent that asks by it."""

    def __init__(self, relay: Relay, playing: Playing, http: httpx2.AsyncClient) -> None:
        self.relay, self.playing, self._http = relay, playing, http

    async def ask(self, *prompt: int, agent: str = "a") -> httpx2.Response:
        self.relay.agent(self.playing, agent)
        body = {"token_ids": list(prompt), "sampling_params": SAMPLING, "cache_salt": "x"}
        return await self._http.post(
            f"{self.relay.base_url}/inference/v1/generate", json=body, headers={"X-Session-ID": agent}
        )

    async def tokens(self, *prompt: int, agent: str = "a") -> list[int]:
        answer = await self.ask(*prompt, agent=agent)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])


def lived(
    live: LiveGateway, plays: Callable[[Life], Awaitable[T]], setting: Setting = "branch", episode: str = "e"
) -> T:
    """A whole life; what it found."""

    async def run() -> T:
        relay = Relay(str(live.http.base_url), "r", 4096)
        async with relay.serving(), httpx2.AsyncClient(timeout=60) as http:
            playing = relay.begin(episode, identity.episode_key(SECRET, episode), setting)
            return await plays(Life(relay, playing, http))

    return asyncio.run(run())


async def two_turns(life: Life) -> tuple[list[int], list[int], Playing]:
    first = await life.tokens(5, 6)
    second = await life.tokens(5, 6, *first, 7)
    return first, second, life.playing


def test_an_episode_that_is_played_again_is_answered_from_the_ledger(live: LiveGateway) -> None:
    """A lost environment worker costs no token: the same calls under the same names are not generated again."""
    with worker(live.daemon):
        one = lived(live, two_turns)
    # No engine is left: what is answered now was recorded.
    again = lived(live, two_turns)
    assert again[:2] == one[:2]
    assert (live.count("turns"), live.count("samples")) == (2, 2)
    assert again[2].taken() == [("0.0", 1), ("0.1", 1)]
    assert not again[2].notes


def test_equal_calls_of_an_episode_are_two_draws(live: LiveGateway) -> None:
    async def twice(life: Life) -> tuple[list[int], list[int]]:
        return await life.tokens(5, 6), await life.tokens(5, 6)

    with worker(live.daemon):
        first, second = lived(live, twice)
    assert live.count("turns") == 2
    assert first != second, "the scripted engine says another text in each sample"


def test_an_environment_that_answers_otherwise_goes_on_as_a_branch(live: LiveGateway) -> None:
    async def otherwise(life: Life) -> tuple[list[int], Playing]:
        first = await life.tokens(5, 6)
        await life.tokens(5, 6, *first, 8)  # the tool said 8, not 7
        await life.tokens(1, 2)
        return first, life.playing

    with worker(live.daemon):
        one = lived(live, two_turns)
        branched = lived(live, otherwise)
        count = live.count("turns")
        third = lived(live, otherwise)
    assert branched[0] == one[0], "up to there it is as recorded"
    assert [name for name, _ in branched[1].taken()] == ["0.0", "0.1~1", "0.2~1"]
    assert "answered otherwise than before at call 0.1" in branched[1].notes[0]
    assert count == 4
    assert live.count("turns") == 4, "the branch is recorded too"
    assert third[1].taken() == branched[1].taken()


@pytest.mark.parametrize(("setting", "again"), [("restart", True), ("fail", False)])
def test_or_ends_by_its_setting(live: LiveGateway, setting: Setting, again: bool) -> None:
    async def otherwise(life: Life) -> tuple[int, Playing]:
        first = await life.tokens(5, 6)
        answer = await life.ask(5, 6, *first, 8)
        later = await life.ask(9)
        assert later.status_code == 400, "an episode that is over asks for nothing more"
        return answer.status_code, life.playing

    with worker(live.daemon):
        lived(live, two_turns)
        status, playing = lived(live, otherwise, setting)
    assert status == 400
    assert playing.ended is not None
    assert playing.ended.again is again
    assert live.count("turns") == 2


def test_a_name_that_the_ledger_has_ended_is_played_under_another(live: LiveGateway) -> None:
    async def once(life: Life) -> Playing:
        assert (await life.ask(5, 6)).status_code == 400
        return life.playing

    with worker(live.daemon):
        lived(live, two_turns)
        ended = live.http.delete("/episodes/e", headers=live.key("e"))
        assert ended.status_code == 200
        playing = lived(live, once)
    assert playing.ended is not None
    assert (playing.ended.again, playing.ended.gone) == (True, True)


def test_what_is_wrong_with_a_call_itself_is_the_agent_s_to_hear(live: LiveGateway) -> None:
    async def bad(life: Life) -> tuple[int, Any]:
        answer = await life.ask()
        return answer.status_code, answer.json()

    status, body = lived(live, bad)
    assert status == 400
    assert "at least one token" in body["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b"\xff", b"[" * 200_000, b'{"token_ids": [1], "stream": true}']
)
def test_a_body_that_cannot_be_passed_on_is_refused_and_is_no_call(live: LiveGateway, body: bytes) -> None:
    """A program of an agent's box reaches this port too."""

    async def bad(life: Life) -> tuple[int, str, int]:
        number = life.relay.agent(life.playing, "a")
        async with httpx2.AsyncClient() as http:
            url = f"{life.relay.base_url}/inference/v1/generate"
            answer = await http.post(url, content=body, headers={"X-Session-ID": "a"})
        return answer.status_code, answer.json()["error"]["message"], life.playing.calls.next(number).number

    status, why, next_number = lived(live, bad)
    assert status == 400
    assert "cannot be passed on" in why
    assert next_number == 0, "it took no call's place"


def test_headers_of_any_size_are_not_kept(live: LiveGateway) -> None:
    async def long(life: Life) -> bytes:
        host, port = life.relay.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: h\r\nX-Long: " + b"a" * (1 << 17))
        try:
            return await reader.readline()
        finally:
            writer.close()

    assert lived(live, long).startswith(b"HTTP/1.1 400")


def test_a_rollout_that_is_not_played_here_is_refused_and_reaches_no_gateway(live: LiveGateway) -> None:
    async def stranger(life: Life) -> int:
        async with httpx2.AsyncClient() as http:
            answer = await http.post(
                f"{life.relay.base_url}/inference/v1/generate",
                json={"token_ids": [1]},
                headers={"X-Session-ID": "unknown"},
            )
            return answer.status_code

    assert lived(live, stranger) == 401
    assert live.count("turns") == 0


def test_versions_are_read_from_an_answer() -> None:
    assert version_of('{"choices": [{"weight_versions": [{"version": "7", "start": 0, "end": 3}]}]}') == 7
    assert version_of('{"choices": [{}]}') == -1
