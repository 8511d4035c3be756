"""Tools with effects outside, through the relay to a real gateway and daemon: each is asked once, whoever dies or asks again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2
import pytest

from scavenger.gateway import identity
from tests.gateway.conftest import SECRET, LiveGateway
from tests.gateway.conftest import live as live  # the fixture
from trainer.episodes import tools, wire
from trainer.episodes.naming import ToolCalls
from trainer.episodes.relay import Playing, Relay
from trainer.episodes.run import Again, Lost, verdict

T = TypeVar("T")


class ToolServer:
    """A server of JSON-RPC over HTTP that counts what it is asked. `before`: awaited before it answers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.before: Callable[[], Awaitable[None]] | None = None
        self.form = "application/json"
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ToolServer]:
        server = await asyncio.start_server(self._one, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp?key=1"
        try:
            yield self
        finally:
            server.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
            asked = json.loads(await reader.readexactly(size) or b"{}")
            self.asked.append(asked)
            if self.before is not None:
                await self.before()
            text = f"answer {len(self.asked)}"
            result = {
                "jsonrpc": "2.0",
                "id": asked.get("id"),
                "result": {"content": [{"type": "text", "text": text}]},
            }
            body = json.dumps(result)
            if self.form != "application/json":
                body = f"event: message\ndata: {body}\n\n"
            writer.write(
                f"HTTP/1.1 200 OK\r\ncontent-type: {self.form}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            )
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class Life:
    """One life of an environment: a relay of its own, as a worker has, and a harness that asks by it."""

    def __init__(self, relay: Relay, playing: Playing, server: ToolServer, http: httpx2.AsyncClient) -> None:
        self.relay, self.playing, self.http = relay, playing, http
        relay.agent(playing, "a")
        self.url = relay.tool("a", "mail", server.url)

    async def ask(self, method: str = "tools/call", number: int = 7, **arguments: Any) -> httpx2.Response:
        params = {"name": "send", "arguments": arguments}
        body = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        return await self.http.post(self.url, json=body)

    async def text(self, **arguments: Any) -> str:
        answer = await self.ask(**arguments)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["id"] == 7
        return str(found["result"]["content"][0]["text"])


@asynccontextmanager
async def a_life(live: LiveGateway, server: ToolServer, external: bool = True) -> AsyncIterator[Life]:
    relay = Relay(str(live.http.base_url), "r", 4096)
    async with relay.serving(), httpx2.AsyncClient(timeout=60) as http:
        yield Life(
            relay, relay.begin("e", identity.episode_key(SECRET, "e"), "branch", external), server, http
        )


def rows(live: LiveGateway) -> list[tuple[Any, ...]]:
    found = live.daemon.query(
        "SELECT tool, answer IS NULL, answered_at IS NULL FROM tool_calls ORDER BY call_id"
    )
    return [tuple(row) for row in found]


def test_an_episode_that_is_played_again_asks_no_tool_again(live: LiveGateway) -> None:
    async def run() -> None:
        async with ToolServer().serving() as server:
            async with a_life(live, server) as one:
                first = [await one.text(to="x"), await one.text(to="x"), await one.text(to="y")]
            assert first == ["answer 1", "answer 2", "answer 3"], "equal calls are two"
            async with a_life(live, server) as two:
                again = [
                    await two.text(to="x"),
                    await two.text(to="y"),
                    await two.text(to="x"),
                    await two.text(to="z"),
                ]
            assert again == ["answer 1", "answer 3", "answer 2", "answer 4"], "whichever comes first"
            assert len(server.asked) == 4

    asyncio.run(run())
    assert rows(live) == [("mail.send", 0, 0)] * 4


def test_without_the_setting_tools_are_asked_again_and_nothing_is_recorded(live: LiveGateway) -> None:
    async def run() -> None:
        async with ToolServer().serving() as server:
            for number in (1, 2):
                async with a_life(live, server, external=False) as life:
                    assert await life.text(to="x") == f"answer {number}"

    asyncio.run(run())
    assert rows(live) == []


def test_a_tool_that_was_asked_and_did_not_answer_before_a_loss_is_not_asked_again(live: LiveGateway) -> None:
    """The worker dies while the tool works. Nobody can know what it did: the episode fails, and for good."""

    async def run() -> Playing:
        async with ToolServer().serving() as server:
            came, never = asyncio.Event(), asyncio.Event()

            async def hang() -> None:
                came.set()
                await never.wait()

            server.before = hang
            async with a_life(live, server) as one:
                task = asyncio.create_task(one.ask(to="x"))
                await came.wait()
                for left in one.relay._tasks:  # as its process's end does
                    left.cancel()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            server.before = None
            async with a_life(live, server) as two:
                refused = await two.ask(to="x")
                assert refused.status_code == 400
                assert "not asked again" in refused.text
                later = await two.http.post(
                    f"{two.relay.base_url}/inference/v1/generate", json={}, headers={"X-Session-ID": "a"}
                )
                assert later.status_code == 400
                assert len(server.asked) == 1
                return two.playing

    playing = asyncio.run(run())
    assert playing.ended is not None
    assert playing.ended.final
    assert not playing.ended.again
    assert rows(live) == [("mail.send", 1, 1)]
    kinds = [row[0] for row in live.daemon.query("SELECT kind FROM events WHERE kind LIKE 'tool%'")]
    assert kinds == ["tool_call_in_doubt"]


def test_a_harness_that_hangs_up_and_asks_again_gets_the_answer_of_the_first_call(live: LiveGateway) -> None:
    async def run() -> None:
        async with ToolServer().serving() as server:
            came, go = asyncio.Event(), asyncio.Event()

            async def wait() -> None:
                came.set()
                await go.wait()

            server.before = wait
            async with a_life(live, server) as life:
                task = asyncio.create_task(life.ask(to="x"))
                await came.wait()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                while life.playing.recorder is None or any(life.playing.recorder.calls.held.values()):
                    await asyncio.sleep(0.01)
                second = asyncio.create_task(life.text(to="x"))
                go.set()
                assert await second == "answer 1"
                server.before = None
                assert await life.text(to="x") == "answer 2", "that one was another call"
            assert len(server.asked) == 2

    asyncio.run(run())


def test_a_server_that_is_gone_answers_with_an_error_which_is_recorded(live: LiveGateway) -> None:
    async def run() -> None:
        server = ToolServer()
        async with server.serving():
            pass
        async with a_life(live, server) as one:
            first = (await one.ask(to="x")).json()
        assert first["result"]["isError"]
        assert "not known" in first["result"]["content"][0]["text"]
        async with server.serving(), a_life(live, server) as two:
            assert (await two.ask(to="x")).json() == first
            assert not server.asked

    asyncio.run(run())


def test_answers_come_as_events_too_and_what_is_no_call_passes_through(live: LiveGateway) -> None:
    async def run() -> None:
        async with ToolServer().serving() as server, a_life(live, server) as life:
            server.form = "text/event-stream"
            assert await life.text(to="x") == "answer 1"
            listed = await life.ask("tools/list")
            assert listed.headers["content-type"] == "text/event-stream"
            assert "answer 2" in listed.text
            assert (
                await life.http.post(f"{life.relay.base_url}/tools/other/mail", json={})
            ).status_code == 401

    asyncio.run(run())
    assert len(rows(live)) == 1


def test_another_episode_s_key_records_nothing(live: LiveGateway) -> None:
    headers = {"authorization": f"Bearer {identity.episode_key(SECRET, 'e')}"}
    body = {"tool": "t", "asker": "0" * 32}
    for path, status in (("f/tools/a", 401), ("e/tools/~", 400), ("e/tools/a", 200)):
        assert live.http.put(f"/episodes/{path}", json=body, headers=headers).status_code == status
    assert (
        live.http.put("/episodes/e/tools/a", json=body | {"asker": "x"}, headers=headers).status_code == 400
    )
    refused = live.http.put("/episodes/e/tools/a/answer", content=b"{", headers=headers)
    assert refused.status_code == 400
    assert "no JSON" in refused.text
    large = live.http.put(
        "/episodes/e/tools/a/answer", content=b'"' + b"x" * (1 << 20) + b'"', headers=headers
    )
    assert large.status_code == 413


def test_calls_of_tools_are_named_by_what_is_asked() -> None:
    assert tools.digest_of("s", "t", {"a": 1, "b": 2}) == tools.digest_of("s", "t", {"b": 2, "a": 1})
    assert (
        len({tools.digest_of(*one) for one in (("s", "t", 1), ("s", "t", 2), ("s", "u", 1), ("r", "t", 1))})
        == 4
    )
    calls = ToolCalls()
    assert [calls.take(0, "d"), calls.take(0, "d"), calls.take(1, "d")] == [0, 1, 0], "two at once are two"
    calls.give_back(0, "d", 0, shown=False)
    assert calls.take(0, "d") == 0, "one that was lost is asked again by its name"
    calls.give_back(0, "d", 0, shown=True)
    calls.give_back(0, "d", 1, shown=True)
    assert calls.take(0, "d") == 2


@pytest.mark.parametrize(
    "body", [b"[]", b"x", b'{"method": "tools/list", "id": 1}', b'{"method": "tools/call"}']
)
def test_what_is_no_call_is_none(body: bytes) -> None:
    assert tools.call_of(body) is None


def test_a_failure_that_is_final_is_not_tried_again() -> None:
    failed = wire.Played("e", error="the tool t was asked")
    assert isinstance(verdict(failed, "", 0, 0, 3), Again)
    final = wire.Played("e", error="the tool t was asked", final=True)
    assert verdict(final, "", 0, 0, 3) == Lost("failed: the tool t was asked")
