"""Tools with effects outside, through the relay to a real gateway and daemon: each is asked once, whoever dies or asks again."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest

from scavenger.gateway import identity
from tests.gateway.conftest import SECRET, LiveGateway, served, write_model
from tests.gateway.conftest import live as live  # the fixture
from trainer.episodes import relay, tools, wire
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
async def a_life(
    live: LiveGateway, server: ToolServer, external: tools.OnDoubt | None = "fail"
) -> AsyncIterator[Life]:
    made = Relay(str(live.http.base_url), "r", 4096)
    async with made.serving(), httpx2.AsyncClient(timeout=60) as http:
        yield Life(made, made.begin("e", identity.episode_key(SECRET, "e"), "branch", external), server, http)


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
                async with a_life(live, server, external=None) as life:
                    assert await life.text(to="x") == f"answer {number}"

    asyncio.run(run())
    assert rows(live) == []


async def lost_while_the_tool_works(live: LiveGateway, server: ToolServer) -> None:
    """A life asks, and its worker dies before the answer."""
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
    never.set()  # it ends, and nobody hears of it


def test_a_tool_that_was_asked_and_did_not_answer_before_a_loss_is_not_asked_again(live: LiveGateway) -> None:
    """The worker dies while the tool works. Nobody can know what it did: the episode fails, and for good."""

    async def run() -> Playing:
        async with ToolServer().serving() as server:
            await lost_while_the_tool_works(live, server)
            async with a_life(live, server) as two:
                for _ in range(3):  # a harness tries again
                    refused = await two.ask(to="x")
                    assert refused.status_code == 400
                    assert "not asked again" in refused.text
                other = await two.ask(to="y")
                assert other.status_code == 400, "an episode that is over asks no other tool either"
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
    assert states(live) == ["asked"]
    ended = live.http.delete("/episodes/e", headers=live.key("e"))
    assert ended.status_code == 200
    assert states(live) == ["unknown"], "whether it took effect, nobody knows"


def states(live: LiveGateway) -> list[str]:
    return [str(row[0]) for row in live.daemon.query("SELECT state FROM v_tool_calls ORDER BY call_id")]


def test_an_agent_is_told_that_an_answer_is_not_known_where_the_run_says_so(live: LiveGateway) -> None:
    async def run() -> None:
        async with ToolServer().serving() as server:
            await lost_while_the_tool_works(live, server)
            for _ in range(2):
                async with a_life(live, server, "tell") as life:
                    found = (await life.ask(to="x")).json()["result"]
                    assert found["isError"]
                    assert "not asked again" in found["content"][0]["text"]
                    assert (await life.ask(to="x")).json()["result"] == found, "a harness that tries again"
                    assert life.playing.ended is None
                    assert await life.text(to="y") == "answer 2"
            assert len(server.asked) == 2

    asyncio.run(run())
    assert states(live) == ["answered"] * 2
    kinds = [row[0] for row in live.daemon.query("SELECT kind FROM events WHERE kind LIKE 'tool%'")]
    assert kinds == ["tool_call_in_doubt"]


def test_an_answer_that_cannot_be_recorded_is_kept_and_its_tool_is_not_asked_again(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway dies between asking and recording, and stays away for longer than the relay waits. The harness tries again."""
    monkeypatch.setattr(tools, "AWAY_S", 0.2)

    async def run() -> None:
        async with ToolServer().serving() as server, a_life(live, server) as life:
            recorder = life.playing.recorder
            assert recorder is not None
            there = recorder.gateway

            async def away() -> None:
                recorder.gateway = "http://127.0.0.1:1"

            server.before = away
            for _ in range(2):
                refused = await life.ask(to="x")
                assert refused.status_code == 400
                assert "refused a record" in refused.text
            assert len(server.asked) == 1
            recorder.gateway, server.before = there, None
            assert await life.text(to="x") == "answer 1"
            assert not recorder.sent
            assert await life.text(to="x") == "answer 2", "that is another call"

    asyncio.run(run())


def test_a_tool_is_asked_once_though_the_daemon_dies_while_it_works(live: LiveGateway) -> None:
    """Between asking and recording the answer: its successor has the call, takes the answer, and gives it to another life."""

    async def run() -> None:
        async with ToolServer().serving() as server:

            async def die() -> None:
                await asyncio.to_thread(live.daemon.kill)
                await asyncio.to_thread(live.daemon.start)

            server.before = die
            async with a_life(live, server) as one:
                assert await one.text(to="x") == "answer 1"
            server.before = None
            async with a_life(live, server) as two:
                assert await two.text(to="x") == "answer 1"
            assert len(server.asked) == 1

    asyncio.run(run())
    assert rows(live) == [("mail.send", 0, 0)]


def test_a_tool_is_asked_once_though_the_gateway_dies_while_it_works(
    live: LiveGateway, tmp_path: Path
) -> None:
    """Its successor knows nothing of the call, and takes the answer all the same."""
    folder = write_model(tmp_path / "model")
    first, second = (served(live.daemon, live.run, folder) for _ in range(2))

    async def run() -> None:
        with contextlib.ExitStack() as later:
            async with ToolServer().serving() as server, a_life(live, server) as one:
                recorder = one.playing.recorder
                assert recorder is not None
                recorder.gateway = str((await asyncio.to_thread(first.__enter__)).http.base_url)

                async def die() -> None:
                    await asyncio.to_thread(first.__exit__, None, None, None)
                    asyncio.get_running_loop().call_later(0.3, arrive)

                def arrive() -> None:
                    assert recorder is not None
                    recorder.gateway = str(later.enter_context(second).http.base_url)

                server.before = die
                assert await one.text(to="x") == "answer 1"
                assert len(server.asked) == 1

    asyncio.run(run())
    assert rows(live) == [("mail.send", 0, 0)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'[{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"send"}}]', "several messages"),
        (b'{"jsonrpc":"2.0","method":"tools/call","params":{"name":"send"}}', "without an id"),
        (b"\x1f\x8b\x08", "no JSON"),
        (b"[" * 100_000, "no JSON"),
    ],
)
def test_no_call_reaches_a_server_past_the_record(body: bytes, why: str, live: LiveGateway) -> None:
    async def run() -> None:
        async with ToolServer().serving() as server, a_life(live, server) as life:
            refused = await life.http.post(life.url, content=body)
            assert refused.status_code == 400
            assert why in refused.text
            assert not server.asked
            twice = b'{"jsonrpc":"2.0","id":7,"method":"tools/list","method":"tools/call","params":{"name":"send"}}'
            assert (await life.http.post(life.url, content=twice)).status_code == 200
            [asked] = server.asked
            assert asked["method"] == "tools/call", "what is read here is what is sent on"

    asyncio.run(run())
    assert len(rows(live)) == 1


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
            for _ in range(2):
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


def test_a_body_that_would_take_the_worker_s_memory_is_refused(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's programs reach the relay from their sandbox; other episodes share its process."""
    monkeypatch.setattr(relay, "MOST_BODY_BYTES", 1 << 16)

    async def run() -> None:
        async with ToolServer().serving() as server, a_life(live, server) as life:
            for path in ("inference/v1/generate", "tools/a/mail"):
                large = await life.http.post(
                    f"{life.relay.base_url}/{path}", content=bytes(1 << 17), headers={"X-Session-ID": "a"}
                )
                assert large.status_code == 413
            assert not server.asked

    asyncio.run(run())


Then = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw(reply: bytes, then: Then) -> AsyncIterator[ToolServer]:
    """A server that answers each request with these bytes, and goes on as `then` says."""
    under_way = 0

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way
        under_way += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await then(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        under_way -= 1

    tool = ToolServer()
    server = await asyncio.start_server(one, "127.0.0.1", 0)
    tool.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    yield tool
    server.close()
    while under_way:
        await asyncio.sleep(0.01)


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the one who asked is gone."""
    await writer.drain()
    await reader.read()


def told(live: LiveGateway, reply: bytes, then: Then) -> str:
    """What an agent is told, and is told again when it asks again."""

    async def run() -> str:
        async with raw(reply, then) as tool, a_life(live, tool) as life, asyncio.timeout(50):
            found = await life.text(to="x")
            assert await life.text(to="x") == found
        return found

    return asyncio.run(run())


def test_a_server_that_sends_without_end_is_cut_off_and_its_call_fails(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers of an agent's box may be the agent's by then: their reply must not take the worker's memory."""
    monkeypatch.setattr(tools, "MOST_REPLY_BYTES", 1 << 20)
    sent = 0

    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while sent < 256 << 20:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    assert "sent over 1,048,576 bytes" in told(live, head, endless)
    assert sent < 64 << 20


@pytest.mark.parametrize(
    ("came", "says"),
    [
        (b"", "no answer for 0.5 s"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{",
            "no answer for 0.5 s",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
            b'data: {"id": 7, "result": {"content": [{"type": "text", "text": "came"}]}}\n\n',
            "came",
        ),
    ],
)
def test_a_server_that_never_comes_to_an_end_is_not_waited_for(
    came: bytes, says: str, live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "ANSWER_S", 0.5)

    assert says in told(live, came, hang)


def test_a_compressed_answer_is_not_unpacked(live: LiveGateway) -> None:
    packed = gzip.compress(bytes(8 << 20))
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"

    assert "compressed its answer" in told(live, head.encode() + packed, hang)


def test_an_episode_s_calls_hold_bodies_up_to_a_bound_together_until_they_are_over(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MOST_BODY_BYTES", 1 << 16)

    async def run() -> None:
        async with ToolServer().serving() as server, a_life(live, server) as life:
            go = asyncio.Event()
            server.before = go.wait  # type: ignore[assignment]
            text = "x" * (60 << 10)
            waiting = [asyncio.create_task(life.ask(to=f"{n}{text}")) for n in range(relay.MOST_BODIES)]
            while len(server.asked) < len(waiting):
                await asyncio.sleep(0.01)
            for path in ("inference/v1/generate", "tools/a/mail"):
                refused = await life.http.post(
                    f"{life.relay.base_url}/{path}", content=bytes(60 << 10), headers={"X-Session-ID": "a"}
                )
                assert refused.status_code == 429, refused.text
            waiting.pop().cancel()  # who hangs up leaves its call, and what that holds
            await asyncio.sleep(0.2)
            assert (await life.ask(to=text)).status_code == 429
            monkeypatch.setattr(relay, "MOST_ASKED", relay.MOST_BODIES)
            few = await life.ask(to="y")
            assert (few.status_code, "asked already" in few.text) == (429, True)
            go.set()
            assert [(await one).status_code for one in waiting] == [200] * len(waiting)
            while life.playing.held:
                await asyncio.sleep(0.01)
            assert (await life.ask(to=text)).status_code == 200

    asyncio.run(run())


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
