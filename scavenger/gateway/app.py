"""The ASGI app: routes, keys, bounds, and the server that runs it.

    POST /inference/v1/generate    vLLM's token-in/token-out endpoint          an episode's key, or a client's
    POST /v1/completions           OpenAI's completions, of token ids          an episode's key, or a client's
    POST /v1/chat/completions      OpenAI's chat, with token ids               an episode's key, or a client's
    GET  /v1/models                the run's model and its context             an episode's key, or a client's
    POST /clients                  answers with the key of a client            the gateway's admin key
    POST /episodes                 begin one: answers with its key             the gateway's admin key
    DELETE /episodes/NAME          it is over                                  the admin key, or its own
    PUT  /episodes/NAME/tools/CALL         a tool is about to be asked         its own key
    PUT  /episodes/NAME/tools/CALL/answer  what it answered                    its own key
    GET  /health                   200 once the daemon has answered            none

The header `X-Scavenger-Policy` names another run that answers for an agent, of those in the run's `data.policies`, and no other.

An episode's key reaches this episode and nothing else. A client's is for a program that has one key for all its calls: they become turns
of episodes that the gateway begins and ends (`series`). Either may come as a URL's password, which HTTP clients send as Basic.

Bodies are bounded, and so are the calls of one caller that run at once and what their bodies hold: an agent that floods is refused alone
(429), of its large bodies a few at a time are read, and of its requests one at a time is parsed and rendered, with a rest after each
that costs much. What would hold the interpreter for long is refused before it is parsed. A caller that hangs up leaves its turn running,
gives its place back at once, and finds the turn when it asks again.

Boundary: starlette and uvicorn are imported here and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import secrets
import socket as sockets
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from scavenger.asyncio_helpers import HungUp, listening_socket, unless_gone
from scavenger.config import RunConfig
from scavenger.errors import AuthError, ConfigError
from scavenger.gateway import dialects, identity
from scavenger.gateway.dialects import BadRequest, ChatRequest, ChatStream, Piece, TurnRequest
from scavenger.gateway.link import Link, TurnStream
from scavenger.gateway.prompts import Conversations, ModelFolder
from scavenger.gateway.series import Series
from scavenger.protocol import keys, messages

log = structlog.get_logger()
T = TypeVar("T")

#: Of a request's body: a million tokens as JSON numbers, or as many words.
MAX_BODY_BYTES = 16 * 1024 * 1024
#: Bytes of a body for each token of the context: the longest prompts, as text or as numbers. No bound is below `LEAST_BODY_BYTES`.
BODY_BYTES_A_TOKEN, LEAST_BODY_BYTES = 64, 1024 * 1024
#: Calls of one episode that may run at once, and how many bodies of the most bytes these may hold together.
MAX_EPISODE_CALLS, MAX_EPISODE_BODIES = 64, 8
#: The same of a client, which may be a whole trainer; and clients that call, since each is kept in memory.
MAX_CLIENT_CALLS, MAX_CLIENT_BODIES, MAX_CLIENTS = 1024, 32, 64
#: Of a request's line and headers together, bytes; and how long they may take to come (s), as long as a connection may be idle.
MAX_HEADER_BYTES, HEADERS_S = 32 * 1024, 60.0
#: How long a body may take to come (s).
BODY_S = 60.0
#: How long a caller waits for the daemon to take its turn (s): a daemon may be restarted meanwhile.
ACCEPT_S = 600.0
#: A larger body is parsed beside the loop, bytes. So much of a body is read at once, too.
AT_ONCE_BYTES = 32 * 1024
#: Larger bodies of one caller that are read, or wait to be parsed; what else it sends waits in its connections. More than one: a body may
#: come slowly, and be one of those.
MAX_LARGE_BODIES = 4
#: Lists and objects of a body, and further values beside the context's tokens. A parser that makes them stops all threads meanwhile:
#: about 20 ms.
MAX_CONTAINERS, MAX_VALUES = 64 * 1024, 128 * 1024
#: Of the body that says which tool is about to be asked, bytes.
MAX_ASK_BYTES = 32 * 1024
#: A caller whose request cost over `REST_FROM_S` of a processor waits `REST` times that before its next one is worked out (s).
REST_FROM_S, REST = 0.01, 3.0
#: How long a caller waits for the word that it has no key, or too many calls (s): one that asks again at once waits for itself.
REFUSED_S = 0.1
_CALL, _ASKER = re.compile(messages.CALL_PATTERN), re.compile(r"[0-9a-f]{32}", re.ASCII)
#: Headers in which a caller may name its request.
NAME_HEADERS = ("idempotency-key", "x-request-id")
#: The header that names one of a client's sessions. `verifiers` sends a rollout's, so that equal prompts of a group are draws of their own.
SESSION_HEADER = "x-session-id"
#: The header that names the run which answers for an agent.
POLICY_HEADER = "x-scavenger-policy"


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """`logprobs`: which of the two recorded logprobs callers see, by vLLM's names: "raw_logprobs" (vLLM's default) or
    "processed_logprobs" (under the sampling distribution). `announce`: whether it writes gateway.HOSTNAME.json.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    logprobs: str = "raw_logprobs"
    announce: bool = True


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: an episode, or a client."""

    name: str
    client: bool

    @property
    def label(self) -> str:
        """One for each; no episode's name holds a space."""
        return f"client {self.name}" if self.client else self.name

    @property
    def most_calls(self) -> int:
        return MAX_CLIENT_CALLS if self.client else MAX_EPISODE_CALLS

    @property
    def most_bodies(self) -> int:
        return MAX_CLIENT_BODIES if self.client else MAX_EPISODE_BODIES

    @property
    def who(self) -> str:
        return "client" if self.client else "episode"


@dataclass(slots=True)
class Gateway:
    """What the routes share."""

    link: Link
    model: ModelFolder
    name: str  # of the model, for /v1/models
    context_length: int
    secret: bytes
    raw: bool = True
    policies: frozenset[str] = frozenset()  # other runs that may be asked
    conversations: Conversations = field(init=False)
    calls: dict[str, int] = field(default_factory=dict)  # by the caller's label
    bodies: dict[str, int] = field(default_factory=dict)  # bytes of the bodies of these calls, likewise
    turnstiles: dict[str, asyncio.Lock] = field(default_factory=dict)  # likewise
    large: dict[str, asyncio.Semaphore] = field(default_factory=dict)  # likewise
    clients: dict[str, Series] = field(default_factory=dict)
    ending: set[asyncio.Task[None]] = field(default_factory=set)  # a loop keeps no task alive

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.model)

    @property
    def max_body(self) -> int:
        """Bytes of the largest body that is read."""
        return min(MAX_BODY_BYTES, max(LEAST_BODY_BYTES, BODY_BYTES_A_TOKEN * self.context_length))

    # ---------------------------------------------------------------- who calls, and with what

    def episode(self, request: Request) -> str:
        """The episode that the request's key opens. Raises `BadRequest`."""
        caller = self.caller(request)
        if caller.client:
            raise BadRequest("a client's key begins no episode: ask for one by POST /episodes", 403)
        return caller.name

    def caller(self, request: Request) -> Caller:
        """Whose key the request has. Raises `BadRequest`."""
        key = _bearer(request)
        if episode := identity.episode_of(self.secret, key):
            return Caller(episode, False)
        if client := identity.client_of(self.secret, key):
            return Caller(client, True)
        raise BadRequest(
            "no key of an episode or a client: ask for one by POST /episodes or POST /clients",
            401,
            "authentication_error",
        )

    @contextlib.contextmanager
    def joined(self, caller: Caller, request: str) -> Iterator[str]:
        """The episode that a call is a turn of, for as long as the call runs. Raises `BadRequest` where too many clients call."""
        if not caller.client:
            yield caller.name
            return
        series = self.clients.get(caller.name)
        if series is None:
            if len(self.clients) >= MAX_CLIENTS:
                raise BadRequest(f"{MAX_CLIENTS} clients call already: use one of their keys", 429)
            series = self.clients[caller.name] = Series(caller.name, secrets.token_hex(4))
        episode = series.join(request)
        try:
            yield episode
        finally:
            for over in series.leave(episode):
                task = asyncio.create_task(self._end_quietly(over))
                self.ending.add(task)
                task.add_done_callback(self.ending.discard)

    async def _end_quietly(self, episode: str) -> None:
        """End an episode that nobody waits for. Where the daemon stays away, it ends with the run."""
        self.conversations.forget(episode)
        try:
            await self.link.end_episode(episode)
        except BadRequest as error:
            log.warning("an episode was not ended", episode=episode, cause=error.message)

    @contextlib.contextmanager
    def counted(self, caller: Caller) -> Iterator[None]:
        """One call of the caller runs. Raises `BadRequest` where too many do."""
        label, now = caller.label, self.calls.get(caller.label, 0)
        if now >= caller.most_calls:
            raise BadRequest(
                f"{caller.most_calls} calls of this {caller.who} run already", 429, "rate_limit_error"
            )
        self.calls[label] = now + 1
        try:
            yield
        finally:
            left = self.calls[label] - 1
            if left:
                self.calls[label] = left
            else:
                del self.calls[label]
                self.large.pop(label, None)
                if (lock := self.turnstiles.get(label)) is not None and not lock.locked():
                    del self.turnstiles[label]

    @contextlib.contextmanager
    def held(self, caller: Caller) -> Iterator[Callable[[int], None]]:
        """What is given counts bytes of a body for as long as the block lasts. It raises `BadRequest` where the caller holds too many."""
        mine, label, most = 0, caller.label, caller.most_bodies * self.max_body

        def hold(nbytes: int) -> None:
            nonlocal mine
            now = self.bodies.get(label, 0) + nbytes
            if now > most:
                why = f"bodies of this {caller.who}'s calls hold over {most:,} bytes"
                raise BadRequest(why, 429, "rate_limit_error")
            self.bodies[label] = now
            mine += nbytes

        try:
            yield hold
        finally:
            if mine:
                left = self.bodies[label] - mine
                if left:
                    self.bodies[label] = left
                else:
                    del self.bodies[label]

    @contextlib.asynccontextmanager
    async def body(
        self, request: Request, caller: Caller, most: int, hold: Callable[[int], None]
    ) -> AsyncIterator[bytes]:
        """The body, of at most `most` bytes. Of a caller's large ones a few are read at a time, each until its block ends: the others stay
        in their connections. Raises `BadRequest`.
        """
        places = self.large.setdefault(caller.label, asyncio.Semaphore(MAX_LARGE_BODIES))
        async with contextlib.AsyncExitStack() as leaving:
            yield await _read(request, most, hold, lambda: leaving.enter_async_context(places))

    @contextlib.asynccontextmanager
    async def in_turn(self, caller: Caller) -> AsyncIterator[_Work]:
        """Held while a request of the caller is worked out: of one that floods, others wait for one request at most. The next one begins
        in a later round of the loop, and where this one was costly, after a rest: others may be about to call.
        """
        label = caller.label
        lock = self.turnstiles.setdefault(label, asyncio.Lock())
        await lock.acquire()
        work = _Work()
        try:
            yield work
        finally:
            rest = REST * work.cost if work.cost > REST_FROM_S else 0.0
            asyncio.get_running_loop().call_later(rest, self._rested, label, lock)

    def _rested(self, label: str, lock: asyncio.Lock) -> None:
        lock.release()
        if label not in self.calls:
            self.turnstiles.pop(label, None)

    def policy(self, request: Request) -> str:
        """The other run that is asked; "": this one. Raises `BadRequest`."""
        asked = request.headers.get(POLICY_HEADER, "")
        if asked in ("", self.name):
            return ""
        if asked not in self.policies:
            known = ", ".join(sorted(self.policies)) or "none"
            shown = messages.words(asked)[:64]
            raise BadRequest(
                f"{POLICY_HEADER}: {shown!r} answers for no agent of this run (data.policies names: {known})",
                403,
            )
        return asked

    # ---------------------------------------------------------------- turns

    async def generate(self, request: Request) -> Response:
        return await self._of_tokens(request, "generate", dialects.parse_generate)

    async def complete(self, request: Request) -> Response:
        return await self._of_tokens(request, "complete", dialects.parse_completion)

    async def _of_tokens(self, request: Request, dialect: str, parse: ParseTokens) -> Response:
        """A body whose prompt is token ids."""
        caller = self.caller(request)
        async with contextlib.AsyncExitStack() as leaving:
            leaving.enter_context(self.counted(caller))  # before anything is read or worked out
            hold = leaving.enter_context(self.held(caller))
            async with self.body(request, caller, self.max_body, hold) as data, self.in_turn(caller) as work:
                asked_for = (dialect, parse, data, self.model.vocabulary, self.context_length)
                content, (turn, prompt) = await work.of(
                    len(data), _understood, *asked_for, _name(request), _session(request, caller)
                )
            episode = leaving.enter_context(self.joined(caller, turn.name or content.hex()))
            asked = _Asked(dialect, episode, content, turn, list(prompt))
            return await self._answer(leaving, request, asked)

    async def chat(self, request: Request) -> Response:
        caller = self.caller(request)
        async with contextlib.AsyncExitStack() as leaving:
            leaving.enter_context(self.counted(caller))
            hold = leaving.enter_context(self.held(caller))
            async with self.body(request, caller, self.max_body, hold) as data, self.in_turn(caller) as work:
                asked_for = ("chat", dialects.parse_chat, data, self.model.vocabulary, self.context_length)
                content, chat = await work.of(
                    len(data), _understood, *asked_for, _name(request), _session(request, caller)
                )
                episode = leaving.enter_context(self.joined(caller, chat.turn.name or content.hex()))
                prompt = await work.beside(self.conversations.prompt, episode, chat)
            asked = _Asked("chat", episode, content, chat.turn, prompt, chat)
            return await self._answer(leaving, request, asked)

    async def _answer(self, leaving: contextlib.AsyncExitStack, request: Request, asked: _Asked) -> Response:
        """`leaving`: what ends with the answer, be it streamed."""
        turn = asked.turn
        policy = self.policy(request)
        opening = messages.OpenTurn(
            asked.episode,
            identity.request_of(asked.episode, turn.name, asked.content, policy),
            asked.content,
            messages.pack_tokens(asked.prompt),
            turn.n,
            turn.sampling(len(asked.prompt), self.context_length, self.model.ends),
            policy=policy,
        )
        stream = await leaving.enter_async_context(self.link.open(opening))
        try:
            async with asyncio.timeout(ACCEPT_S):
                accepted = await unless_gone(request.receive, stream.wait_accepted())
        except TimeoutError:
            raise BadRequest("the daemon does not answer: try again", 503, "server_error") from None
        answer = _Answer(self, opening, accepted, asked)
        if turn.stream:
            return _Events(answer.events(stream), leaving.pop_all())
        return JSONResponse(await unless_gone(request.receive, answer.whole(stream)))

    # ---------------------------------------------------------------- the rest

    async def models(self, request: Request) -> Response:
        self.caller(request)
        card = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "scavenger",
            "root": self.name,
            "parent": None,
            "max_model_len": self.context_length,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def begin(self, request: Request) -> Response:
        if not identity.is_admin(self.secret, _bearer(request)):
            raise BadRequest("not the gateway's admin key", 401, "authentication_error")
        name = _parsed(await _read(request, LEAST_BODY_BYTES)).get("episode") or secrets.token_hex(12)
        if not isinstance(name, str) or not identity.is_episode(name):
            raise BadRequest(f"episode: a name of the form {messages.EPISODE_PATTERN}")
        return JSONResponse({"episode": name, "api_key": identity.episode_key(self.secret, name)})

    async def client(self, request: Request) -> Response:
        """The key of a client. It begins nothing: asked again, the same name has the same key."""
        if not identity.is_admin(self.secret, _bearer(request)):
            raise BadRequest("not the gateway's admin key", 401, "authentication_error")
        name = _parsed(await _read(request, LEAST_BODY_BYTES)).get("client")
        if not isinstance(name, str) or not identity.is_client(name):
            most = identity.MAX_CLIENT_CHARS
            raise BadRequest(
                f"client: a name of the form {messages.EPISODE_PATTERN}, of {most} characters at most"
            )
        return JSONResponse({"client": name, "api_key": identity.client_key(self.secret, name)})

    async def end(self, request: Request) -> Response:
        name, key = request.path_params["name"], _bearer(request)
        if not (identity.is_admin(self.secret, key) or identity.episode_of(self.secret, key) == name):
            raise BadRequest("a key of another episode", 401, "authentication_error")
        if not identity.is_episode(name):
            raise BadRequest("no name of an episode")
        await self.link.end_episode(name)
        self.conversations.forget(name)
        return JSONResponse({"episode": name, "state": "ended"})

    async def ask_tool(self, request: Request) -> Response:
        """Whether a tool is to be asked, or what it answered. The body: `tool`, a name for people; `asker`, 32 random hex digits."""
        with self._of_a_tool(request) as (episode, call):
            body = _parsed(await _read(request, MAX_ASK_BYTES))
            tool, asker = body.get("tool"), body.get("asker")
            if not isinstance(tool, str) or not isinstance(asker, str) or not _ASKER.fullmatch(asker):
                raise BadRequest("tool: a text, asker: 32 hex digits")
            asked = messages.AskTool(episode, call, messages.words(tool), bytes.fromhex(asker))
            return _state(await self.link.tool(asked))

    async def answer_tool(self, request: Request) -> Response:
        """The body is the answer, JSON. What is recorded comes back: of several answers the first."""
        with self._of_a_tool(request) as (episode, call):
            caller, most = Caller(episode, False), messages.MAX_ANSWER_BYTES
            with self.held(caller) as hold:
                async with self.body(request, caller, most, hold) as data, self.in_turn(caller) as work:
                    await work.of(len(data), _check_answer, data)
            return _state(await self.link.tool(messages.AnswerTool(episode, call, data)))

    @contextlib.contextmanager
    def _of_a_tool(self, request: Request) -> Iterator[tuple[str, str]]:
        """(episode, call) of a request by the episode's own key. Raises `BadRequest`."""
        episode, call = self.episode(request), request.path_params["call"]
        if request.path_params["name"] != episode:
            raise BadRequest("a key of another episode", 401, "authentication_error")
        if not _CALL.match(call):
            raise BadRequest(f"a call's name is of the form {messages.CALL_PATTERN}")
        with self.counted(Caller(episode, False)):
            yield episode, call

    async def health(self, request: Request) -> Response:
        there = self.link.connected
        return JSONResponse({"daemon": "connected" if there else "away"}, 200 if there else 503)


#: A body's parser, for dialects whose prompts are token ids: (body, vocabulary, name) -> (request, prompt).
ParseTokens = Callable[[Any, int, str], tuple[TurnRequest, tuple[int, ...]]]


class _Work:
    """What one request costs until it is passed on: seconds of a processor."""

    def __init__(self) -> None:
        self.cost = 0.0

    async def of(self, nbytes: int, work: Callable[..., T], *args: Any) -> T:
        """Do it, beside the loop where `nbytes` are many."""
        if nbytes <= AT_ONCE_BYTES:
            return self._counted(work, *args)
        return await self.beside(work, *args)

    async def beside(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(self._counted, work, *args)

    def _counted(self, work: Callable[..., T], *args: Any) -> T:
        began = time.thread_time()
        try:
            return work(*args)
        finally:
            self.cost += time.thread_time() - began


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call that was read. `content`: what it asks for, as a hash. `chat`: where it is one."""

    dialect: str  # "generate", "complete", "chat"
    episode: str
    content: bytes
    turn: TurnRequest
    prompt: list[int]
    chat: ChatRequest | None = None


#: What the ids of answers begin with.
_ID_PREFIX = {"generate": "generate-tokens", "complete": "cmpl", "chat": "chatcmpl"}


class _Answer:
    """How one accepted turn is shown in its dialect."""

    def __init__(
        self, gateway: Gateway, opening: messages.OpenTurn, accepted: messages.TurnAccepted, asked: _Asked
    ) -> None:
        self._gateway, self._opening, self._turn, self._chat = gateway, opening, asked.turn, asked.chat
        self._dialect = asked.dialect
        # A gateway that began anew may have rendered the conversation to other tokens than the turn was generated from.
        same = accepted.prompt_sha256 == sha256(opening.prompt).digest()
        self._prompt: list[int] | None = asked.prompt if same else None
        self._prompt_tokens = accepted.prompt_tokens
        self._id = f"{_ID_PREFIX[asked.dialect]}-{opening.request.hex()[:32]}"
        if asked.dialect == "generate" and asked.turn.name:
            self._id = asked.turn.name

    def _text(self, tokens: Sequence[int]) -> str:
        return self._gateway.model.text(tokens, skip_special_tokens=self._turn.skip_special_tokens)

    async def whole(self, stream: TurnStream) -> dict[str, Any]:
        """The answer in one piece. Raises `BadRequest`."""
        async for _ in stream.pieces(raw=self._gateway.raw):
            pass
        pieces = [
            Piece(
                index,
                sample.tokens,
                sample.raw_logprobs if self._gateway.raw else sample.logprobs,
                0,
                sample.version,
                sample.finish,
            )
            for index, sample in enumerate(stream.samples)
        ]
        created = int(time.time())
        if self._dialect == "generate":
            return dialects.generate_reply(
                self._id, self._turn, pieces, self._prompt, self._prompt_tokens, created
            )
        texts = [dialects.shown(self._text(piece.tokens), self._turn.stop, whole=True) for piece in pieces]
        if self._chat is None:
            return dialects.completion_reply(
                self._id,
                self._turn,
                pieces,
                texts,
                self._prompt,
                self._prompt_tokens,
                created,
                self._gateway.model.token,
            )
        self._remember(pieces, texts)
        return dialects.chat_reply(
            self._id,
            self._chat,
            pieces,
            texts,
            self._prompt,
            self._prompt_tokens,
            created,
            self._gateway.model.token,
        )

    async def events(self, stream: TurnStream) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        try:
            parts = self._chat_events(stream) if self._chat is not None else self._generate_events(stream)
            async for part in parts:
                yield part
            yield dialects.DONE
        except BadRequest as error:
            yield dialects.event(dialects.error_body(error.message, error.kind, error.status))
        except Exception:
            log.exception("an answer failed")
            yield dialects.event(dialects.error_body(_FAULT, "server_error", 500))

    async def _generate_events(self, stream: TurnStream) -> AsyncIterator[bytes]:
        first, tokens = True, 0
        async for piece in stream.pieces(raw=self._gateway.raw):
            yield dialects.generate_event(self._id, self._turn, piece, self._prompt, first=first)
            first, tokens = False, tokens + len(piece.tokens)
        if self._turn.include_usage:
            counted = dialects.usage(self._prompt_tokens, tokens)
            yield dialects.event(
                {"request_id": self._id, "output_mode": "tokens", "choices": [], "usage": counted}
            )

    async def _chat_events(self, stream: TurnStream) -> AsyncIterator[bytes]:
        assert self._chat is not None
        shown = ChatStream(
            self._id, self._chat, self._prompt, int(time.time()), self._text, self._gateway.model.token
        )
        async for piece in stream.pieces(raw=self._gateway.raw):
            for part in shown.events(piece):
                yield part
        whole = [
            Piece(index, sample.tokens, (), 0, sample.version, sample.finish)
            for index, sample in enumerate(stream.samples)
        ]
        self._remember(whole, shown.texts())
        if self._turn.include_usage:
            yield shown.usage(self._prompt_tokens)

    def _remember(self, pieces: Sequence[Piece], texts: Sequence[str]) -> None:
        """The conversation goes on from these tokens."""
        if self._chat is None or self._prompt is None:
            return
        for piece, text in zip(pieces, texts, strict=True):
            said, calls = dialects.split_tool_calls(text) if self._chat.tools else (text, [])
            self._gateway.conversations.answered(
                self._opening.episode, self._chat, self._prompt, said, calls, array("i", piece.tokens)
            )


# ---------------------------------------------------------------- HTTP

_FAULT = "the gateway failed at this request: see its log"


class _Events(StreamingResponse):
    """Server-sent events, and what ends with them even where none is ever sent."""

    def __init__(self, parts: AsyncIterator[bytes], leaving: contextlib.AsyncExitStack) -> None:
        super().__init__(parts, media_type="text/event-stream")
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._leaving:
            await super().__call__(scope, receive, send)


def _state(found: messages.ToolState) -> Response:
    """As JSON; the answer is in it as it came."""
    answer = found.answer or b"null"
    return Response(
        b'{"state":"' + found.state.encode() + b'","answer":' + answer + b"}", media_type="application/json"
    )


def _bearer(request: Request) -> str:
    given = identity.bearer_of(request.headers.get("authorization", ""))
    return given or request.headers.get("x-api-key", "")


def _name(request: Request) -> str:
    name = next((request.headers[h] for h in NAME_HEADERS if h in request.headers), "")
    if len(name) > dialects.MAX_NAME_CHARS:
        raise BadRequest(f"a request's name has at most {dialects.MAX_NAME_CHARS} characters")
    return name


def _session(request: Request, caller: Caller) -> str:
    """Which of a client's sessions asks. An episode is one itself. Raises `BadRequest`."""
    session = request.headers.get(SESSION_HEADER, "") if caller.client else ""
    if len(session) > dialects.MAX_NAME_CHARS:
        raise BadRequest(f"a session's name has at most {dialects.MAX_NAME_CHARS} characters")
    return session


async def _nothing() -> None:
    pass


async def _read(
    request: Request,
    most: int,
    hold: Callable[[int], None] = lambda _: None,
    large: Callable[[], Awaitable[None]] = _nothing,
) -> bytes:
    """The body, of at most `most` bytes; `hold` is told of each part. `large`: awaited where it has over `AT_ONCE_BYTES`, before more of
    it is read. Raises `BadRequest`.
    """
    declared = int(request.headers.get("content-length") or 0)  # h11 lets no other through than digits
    parts, nbytes, waited = [], 0, declared > AT_ONCE_BYTES
    if declared > most:
        raise BadRequest(f"a body of over {most:,} bytes", 413)
    if waited:
        await large()
    try:
        async with asyncio.timeout(BODY_S) as limit:
            async for part in request.stream():
                nbytes += len(part)
                if nbytes > most:
                    raise BadRequest(f"a body of over {most:,} bytes", 413)
                hold(len(part))
                parts.append(part)
                if nbytes > AT_ONCE_BYTES and not waited:  # in chunks: how many, nobody said
                    limit.reschedule(None)
                    await large()
                    limit.reschedule(asyncio.get_running_loop().time() + BODY_S)
                    waited = True
    except TimeoutError:
        raise BadRequest(f"the body did not come within {BODY_S:g} s", 408) from None
    return b"".join(parts)


def _parsed(data: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises `BadRequest`."""
    try:
        found = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest("the body is no JSON object")
    return found


def _content(dialect: str, body: dict[str, Any], session: str) -> bytes:
    """Raises `BadRequest`."""
    try:
        return identity.content_of(dialect, body, session)
    except (OverflowError, ValueError, RecursionError) as error:
        raise BadRequest(f"the body holds what cannot be passed on: {error}") from None


def _check_size(data: bytes, values: int) -> None:
    """Of what is JSON: that it holds few lists and objects, and at most `values` values, apart from what stands in texts. Takes a small
    part of the time in which it would be parsed. Raises `BadRequest`.
    """
    if _containers(data) > MAX_CONTAINERS or data.count(b",") > values:
        bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
        texts = bare.count(b'"') // 2  # each of them is a value, or a value's name
        outside = b"" if texts > 2 * values else b"".join(bare.split(b'"')[::2])
        if _containers(outside) > MAX_CONTAINERS:
            raise BadRequest(f"the body holds over {MAX_CONTAINERS:,} lists and objects")
        if texts > 2 * values or outside.count(b",") > values:
            raise BadRequest(f"the body holds over {values:,} values")


def _containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _check_answer(data: bytes) -> None:
    """Raises `BadRequest`. Of one that holds very many lists and objects none is made."""
    many = _containers(data) > MAX_CONTAINERS
    try:
        if many:
            data.decode()
        msgspec.json.decode(data, type=msgspec.Raw if many else Any)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise BadRequest(f"the answer is no JSON: {error}") from None


def _understood(
    dialect: str,
    parse: Callable[[Any, int, str], T],
    data: bytes,
    vocabulary: int,
    context_length: int,
    name: str,
    session: str,
) -> tuple[bytes, T]:
    """(hash of what is asked for, the request). Raises `BadRequest`."""
    _check_size(data, context_length + MAX_VALUES)
    body = _parsed(data)
    return _content(dialect, body, session), parse(body, vocabulary, name)


Handler = Callable[[Request], Awaitable[Response]]


def _refusing(handler: Handler) -> Handler:
    """The handler, whose refusals are answered in OpenAI's shape."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except BadRequest as error:
            if error.status in (401, 429):
                await asyncio.sleep(REFUSED_S)
            headers = {"connection": "close"} if error.status in (408, 413) else {}
            headers |= {"retry-after": "1"} if error.status in (429, 503) else {}
            body = dialects.error_body(error.message, error.kind, error.status)
            return JSONResponse(body, error.status, headers)
        except (ClientDisconnect, HungUp):
            return Response(status_code=499)
        except Exception:
            log.exception("a request failed", path=request.url.path)
            return JSONResponse(dialects.error_body(_FAULT, "server_error", 500), 500)

    return answered


def make_app(gateway: Gateway, stop: Callable[[], None] = lambda: None) -> Starlette:
    """The ASGI app; the link to the daemon runs as long as it does. `stop`: called where the link ended by a fault."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.error("the link to the daemon ended", cause=str(task.exception()))
            stop()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(gateway.link.run())
        task.add_done_callback(ended)
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    routes: list[tuple[str, str, Handler]] = [
        ("/inference/v1/generate", "POST", gateway.generate),
        ("/v1/completions", "POST", gateway.complete),
        ("/v1/chat/completions", "POST", gateway.chat),
        ("/v1/models", "GET", gateway.models),
        ("/clients", "POST", gateway.client),
        ("/episodes", "POST", gateway.begin),
        ("/episodes/{name}", "DELETE", gateway.end),
        ("/episodes/{name}/tools/{call}", "PUT", gateway.ask_tool),
        ("/episodes/{name}/tools/{call}/answer", "PUT", gateway.answer_tool),
        ("/health", "GET", gateway.health),
    ]
    return Starlette(
        routes=[Route(path, _refusing(handler), methods=[method]) for path, method, handler in routes],
        exception_handlers={HTTPException: _no_such_thing},
        lifespan=lifespan,
    )


async def _no_such_thing(request: Request, error: Exception) -> Response:
    """No such path, or another method, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    why = f"{request.method} {request.url.path}: {error.detail}"
    body = dialects.error_body(why[:400], "invalid_request_error", error.status_code)
    return JSONResponse(body, error.status_code, error.headers)


class _Patient(H11Protocol):
    """A connection on which no request comes within `HEADERS_S` is closed, however much of its headers has come."""

    _watching: asyncio.TimerHandle | None = None
    _before: Any = None  # the request that was under way, or answered, when it was looked at last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watching is not None:
            self._watching.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        self._before = self.cycle
        self._watching = self.loop.call_later(HEADERS_S, self._look)

    def _look(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._before and not self.transport.is_closing():
            self.transport.close()
        else:
            self._watch()


def server_config(app: Starlette, **options: Any) -> uvicorn.Config:
    """How the app is served: HTTP/1.1 by h11, which bounds headers, and no websockets."""
    return uvicorn.Config(
        app,
        http=_Patient,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=int(HEADERS_S),
        log_level="warning",
        access_log=False,
        lifespan="on",
        **options,
    )


# ---------------------------------------------------------------- the process


def secret_of(out_dir: Path) -> bytes:
    """The secret that the keys of this run's episodes are made with: of all its gateways, made by the first."""
    path = out_dir / "gateway.secret"
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            fresh = path.with_name(f".gateway.{secrets.token_hex(8)}")
            keys.write_private(fresh, secrets.token_bytes(identity.SECRET_BYTES))
            try:
                path.hardlink_to(fresh)  # of two that begin at once one wins
            finally:
                fresh.unlink()
    if path.stat().st_mode & 0o077:
        raise AuthError(f"{path} can be read by others", f"chmod 600 {path}")
    secret = path.read_bytes()
    if len(secret) != identity.SECRET_BYTES:
        raise AuthError(f"{path} holds no secret of a gateway", "remove it: every episode's key is void then")
    return secret


def serve(config: RunConfig, options: GatewayOptions) -> None:
    """Serve the run's gateway until SIGTERM or SIGINT. Raises `ConfigError`, `AuthError`.

    `out_dir/gateway.HOSTNAME.json` (mode 0600) tells the processes of the job on this host where it listens, and the admin key; it goes
    with the gateway.
    """
    loopback = options.host == "localhost" or _is_loopback(options.host)
    if not loopback and options.tls_certificate is None:
        raise ConfigError(
            f"--host {options.host}: prompts and keys would go over the network in the clear",
            "give --tls-cert and --tls-key, or serve on 127.0.0.1 on each host that runs agents",
        )
    run = config.run
    secret = secret_of(run.out_dir)
    model = ModelFolder(config.model.path, config.sampling.stop_token_ids)
    key = keys.read_keypair(run.key or keys.key_path_for(run.state_dir))
    gateway = Gateway(
        Link(run.state_dir, key, run.name),
        model,
        run.name,
        config.model.context_length,
        secret,
        raw=options.logprobs == "raw_logprobs",
        policies=frozenset(config.other_policies),
    )
    with listening_socket(
        options.host, options.port
    ) as listening:  # before it is announced: who comes early waits
        port = listening.getsockname()[1]
        scheme = "http" if options.tls_certificate is None else "https"
        endpoint = f"{scheme}://{_reachable(options.host)}:{port}"
        announced = json.dumps(
            {"endpoint": endpoint, "admin_key": identity.admin_key(secret), "logprobs": options.logprobs}
        ).encode()
        place = run.out_dir / f"gateway.{sockets.gethostname()}.json"
        failed: list[bool] = []

        def stop() -> None:
            failed.append(True)
            server.should_exit = True

        server = uvicorn.Server(
            server_config(
                make_app(gateway, stop),
                timeout_graceful_shutdown=5,
                ssl_certfile=options.tls_certificate,
                ssl_keyfile=options.tls_key,
            )
        )
        if options.announce:
            keys.write_private(place, announced)
        log.info("gateway", run=run.name, endpoint=endpoint)
        try:
            with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises again what ended it
                asyncio.run(server.serve(sockets=[listening]))
        finally:
            withdraw(place, announced)
        if failed:
            raise SystemExit(1)


def withdraw(place: Path, announced: bytes) -> None:
    """Remove what this gateway announced: who gets its port next must not be sent keys. Another one's stays."""
    with contextlib.suppress(OSError):
        if place.read_bytes() == announced:
            place.unlink()


def _reachable(host: str) -> str:
    """What a caller on another host may connect to; loopback stays loopback."""
    if host in ("0.0.0.0", "::"):
        return sockets.gethostname()
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
