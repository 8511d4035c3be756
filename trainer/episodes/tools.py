"""Agents' calls of tools on their way from a harness to an MCP server, recorded where their effects are outside.

    harness --> relay /tools/ROLLOUT/SERVER/… --> MCP server (a process, a sandbox's, or elsewhere)
                     tools/call: PUT …/tools/CALL at the gateway, then the server, then PUT …/answer, then the harness

With `data.effects = "external"` a call is durable before its tool is asked, and its answer before the harness has it. An episode that is
played again gets the recorded answers, and no tool is asked again. A call that was asked without an answer is in doubt: whether it took
effect, nobody can know. It ends the episode for good, or the agent is told so, as `data.on_doubt` says. A server that fails while it is
asked answers with an error, which is recorded as any answer: a harness that tried again would ask twice.

Within one life, too, a tool is asked once: an answer that could not be recorded is kept here, and the harness's next try records it.

Boundary: JSON-RPC over HTTP, as MCP's streamable transport has it; the relay owns sockets and knows whose rollout is whose.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2

from scavenger.backoff import backoff_s
from scavenger.protocol.messages import MAX_ANSWER_BYTES
from trainer.episodes.naming import End, ToolCalls

#: Headers that are of one connection, or that this side makes anew.
_HOP = {
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "accept-encoding",
}
#: While the gateway is away.
AWAY_S = 900.0
#: A tool's server has as long to answer, or as an agent's episode may last where that is longer.
ANSWER_S = 900.0
#: Of a server's reply, with the notifications that it may send before its answer. A server of an agent's box may be the agent's by now.
MOST_REPLY_BYTES = 2 * MAX_ANSWER_BYTES
#: Of a tool's name as it is recorded: a model may say anything for it.
MOST_NAME_CHARS = 1000
OnDoubt = Literal["fail", "tell"]
UNANSWERED = "scavenger/unanswered"
WAITS = (429, 500, 503)


@dataclass(frozen=True, slots=True)
class Server:
    """An MCP server of one rollout: its name, and where this process reaches it (with its path and query)."""

    name: str
    url: str


@dataclass(slots=True)
class Recorder:
    """The gateway's record of one episode's calls. `asker`: random, of this life of the episode's environment. `sent`: calls whose tools
    this life has asked, with their answers until these are recorded.
    """

    gateway: str
    episode: str
    key: str
    asker: str
    http: httpx2.AsyncClient
    on_doubt: OnDoubt = "fail"
    calls: ToolCalls = field(default_factory=ToolCalls)
    sent: dict[str, bytes | None] = field(default_factory=dict)
    #: An agent's longest, in seconds.
    seconds: float = 0.0
    #: A tool of this episode was asked, in this life or an earlier one.
    any_asked: bool = False

    async def asked(self, call: str, tool: str) -> tuple[str, Any]:
        """(state, answer) of a call that is about to be made. Raises `Refused`."""
        body = json.dumps({"tool": tool, "asker": self.asker}).encode()
        return await self._put(f"/episodes/{self.episode}/tools/{call}", body)

    async def answered(self, call: str, answer: bytes) -> Any:
        """What is recorded as its answer: the first that came. Raises `Refused`."""
        return (await self._put(f"/episodes/{self.episode}/tools/{call}/answer", answer))[1]

    async def _put(self, path: str, body: bytes) -> tuple[str, Any]:
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        tries, deadline = 0, asyncio.get_running_loop().time() + AWAY_S
        while True:
            tries += 1
            try:
                reply = await self.http.put(f"{self.gateway}{path}", content=body, headers=headers)
            except httpx2.TransportError as error:
                status, said = 503, type(error).__name__
            else:
                status, said = reply.status_code, reply.text
            if status == 200:
                found = json.loads(said)
                return str(found["state"]), found["answer"]
            if status not in WAITS or asyncio.get_running_loop().time() > deadline:
                raise Refused(status, said)
            await asyncio.sleep(backoff_s(0.1, 5.0, tries))


class Refused(Exception):
    """The gateway takes no record of a call."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"the gateway refused a record of a tool's call ({status}): {said[:500]}")
        self.status = status


def call_of(body: bytes) -> tuple[Any, str, Any] | None:
    """(id, tool, arguments) of a JSON-RPC body that calls a tool; None for anything else, a batch too: MCP has none since 2025-06."""
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    if not isinstance(asked, dict) or asked.get("method") != "tools/call" or "id" not in asked:
        return None
    params = asked.get("params")
    params = params if isinstance(params, dict) else {}
    return asked["id"], str(params.get("name", "")), params.get("arguments")


class Unreadable(Exception):
    """What a harness sent cannot be recorded as a call, and might be one to its server."""


def checked(body: bytes) -> bytes:
    """A message for a server whose calls are recorded: as it is read here and not otherwise. Raises `Unreadable`.

    A batch of calls, a call without an id, or text that two parsers read differently would ask a tool past the record.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise Unreadable("the message is no JSON") from None
    if not isinstance(asked, dict):
        raise Unreadable("several messages at once: MCP has one a request since 2025-06-18")
    if asked.get("method") == "tools/call" and "id" not in asked:
        raise Unreadable("a call of a tool without an id has no answer")
    return json.dumps(asked).encode()


def digest_of(server: str, tool: str, arguments: Any) -> str:
    """Of what is asked: equal for equal calls, whatever the order of their arguments."""
    text = json.dumps([server, tool, arguments], sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:40]


def message_of(content_type: str, body: bytes, number: Any) -> dict[str, Any] | None:
    """The JSON-RPC response to a call, out of an answer's body: JSON, or server-sent events."""
    found = [body]
    if content_type.startswith("text/event-stream"):
        events = body.replace(b"\r\n", b"\n").split(b"\n\n")
        found = [
            b"\n".join(line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:"))
            for event in events
        ]
    for one in found:
        try:
            message = json.loads(one)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(message, dict)
            and message.get("id") == number
            and ("result" in message or "error" in message)
        ):
            return message
    return None


def failed(why: str) -> dict[str, Any]:
    """A tool's answer that says why there is none, as the model reads it. Each release of MCP takes it."""
    result = {
        "resultType": "complete",
        "content": [{"type": "text", "text": f"error: {why}"}],
        "isError": True,
        "_meta": {UNANSWERED: True},
    }
    return {"result": result}


def unanswered(answer: Mapping[str, Any]) -> bool:
    """Whether an answer is one of `failed`: whoever asks the same again gets it again, since the tool may have done what it was asked."""
    result = answer.get("result")
    meta = result.get("_meta") if isinstance(result, dict) else None
    return isinstance(meta, dict) and meta.get(UNANSWERED) is True


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """Without compression: a few bytes of it may become any number here."""
    kept = {name: value for name, value in headers.items() if name.lower() not in _HOP}
    return {**kept, "accept-encoding": "identity"}


def returned(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def target(server: Server, query: str) -> str:
    """Where a request goes. What the harness adds to the query is not the server's."""
    return server.url if not query or urlsplit(server.url).query else f"{server.url}?{query}"


#: Of a call that was asked and has no answer.
IN_DOUBT = (
    "was asked before its environment worker was lost, and its answer is not known: it is not asked again"
)


class InDoubt(Exception):
    """A call that was asked and has no answer."""

    def __init__(self, tool: str) -> None:
        super().__init__(tool)
        self.end = End(False, f"the tool {tool} {IN_DOUBT}", final=True)


async def recorded(
    recorder: Recorder,
    http: httpx2.AsyncClient,
    server: Server,
    call: str,
    request: httpx2.Request,
    body: bytes,
) -> dict[str, Any]:
    """The `result` or `error` of a call, as the ledger has it. Raises `InDoubt`, `Refused`."""
    asked = call_of(body)
    assert asked is not None
    number, tool, _ = asked
    shown = (f"{server.name}.{tool}" if server.name else tool)[:MOST_NAME_CHARS]
    if call in recorder.sent:  # by this life; only its record is missing
        kept_answer = recorder.sent[call]
        if kept_answer is None:
            raise InDoubt(shown)
        return await _kept(recorder, call, kept_answer)
    state, answer = await recorder.asked(call, shown)
    recorder.any_asked = True
    if state == "answered":
        return dict(answer)
    if state == "open":
        if recorder.on_doubt == "fail":
            raise InDoubt(shown)
        return dict(await recorder.answered(call, json.dumps(failed(f"this call {IN_DOUBT}")).encode()))
    recorder.sent[call] = None
    message = await _answer(http, request, number, max(ANSWER_S, recorder.seconds))
    kept = {name: message[name] for name in ("result", "error") if name in message}
    data = json.dumps(kept).encode()
    if len(data) > MAX_ANSWER_BYTES:
        data = json.dumps(failed(f"the tool's answer has over {MAX_ANSWER_BYTES:,} bytes")).encode()
    recorder.sent[call] = data
    return await _kept(recorder, call, data)


async def _answer(
    http: httpx2.AsyncClient, request: httpx2.Request, number: Any, seconds: float
) -> dict[str, Any]:
    """What a server answers to a call, or one of `failed`. It takes this process no more memory and no longer than it may."""
    body, kind, status, unknown = bytearray(), "", 0, "whether the call took effect is not known"
    try:
        async with asyncio.timeout(seconds):
            reply = await http.send(request, stream=True)
            try:
                kind, status = reply.headers.get("content-type", ""), reply.status_code
                if reply.headers.get("content-encoding", "identity").lower() != "identity":
                    return failed(
                        f"the tool's server compressed its answer, which it was not asked for: {unknown}"
                    )
                async for part in reply.aiter_raw():
                    body += part
                    if len(body) > MOST_REPLY_BYTES:
                        break
            finally:
                await reply.aclose()
        why = f"the tool's server answered with status {status} and no result"
    except TimeoutError:
        why = f"the tool's server gave no answer for {seconds:g} s: {unknown}"
    except httpx2.TransportError as error:
        why = f"the tool's server is gone ({type(error).__name__}): {unknown}"
    if len(body) > MOST_REPLY_BYTES:
        return failed(f"the tool's server sent over {MOST_REPLY_BYTES:,} bytes: {unknown}")
    # An event may have come though its stream did not end.
    return message_of(kind, bytes(body), number) or failed(why)


async def _kept(recorder: Recorder, call: str, data: bytes) -> dict[str, Any]:
    found = dict(await recorder.answered(call, data))
    del recorder.sent[call]
    return found


async def streamed(reply: httpx2.Response) -> AsyncIterator[bytes]:
    """What a server sends, as it comes."""
    try:
        async for part in reply.aiter_raw():
            yield part
    finally:
        await reply.aclose()
