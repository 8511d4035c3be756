"""The gateway's connection to the daemon: turns are opened and followed, over reconnects and restarts of the daemon.

    open() -> OpenTurn, repeated until the turn is whole: after a reconnect, after a gap, after silence; each time with what is here
           <- Reply(TurnAccepted | Denied), TurnTokens

The daemon knows a turn by its request, so that repeating is safe. Runs on one asyncio loop. Knows no HTTP.

Boundary: the gateway's socket and clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog
import zmq
import zmq.asyncio

from scavenger.backoff import backoff_s
from scavenger.client import MIN_TIMEOUT_S, ClientTimeout
from scavenger.errors import DaemonUnavailable, ScavengerError
from scavenger.gateway.dialects import BadRequest, Piece
from scavenger.protocol import keys, messages

log = structlog.get_logger()

PING_S = 1.0
#: A turn of which nothing was heard for so long is asked for again: a message may have been lost.
ASK_AGAIN_S = 5.0
#: How long the end of an episode is asked for (s).
GIVE_UP_S = 600.0
#: Codes of `Denied` as a caller sees them: HTTP status, OpenAI's error type.
DENIED = {
    "invalid": (400, "invalid_request_error"),
    "conflict": (409, "conflict_error"),
    "ended": (410, "invalid_request_error"),
    "full": (429, "rate_limit_error"),
    "not-owner": (403, "permission_error"),
    "budget": (400, messages.BUDGET_SPENT),  # no client asks again after this status
}


#: Calls that are repeated until they are answered: the second one changes nothing.
Repeated = messages.EndEpisode | messages.AskTool | messages.AnswerTool


@dataclass(slots=True)
class _Sample:
    """What is here of one sample. `logprobs`: under the sampling distribution; `raw_logprobs`: under the raw model."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    raw_logprobs: array[float] = field(default_factory=lambda: array("f"))
    finish: str = ""
    version: int = 0


class TurnStream:
    """One turn as it comes. Several callers may read it."""

    def __init__(self, body: messages.OpenTurn) -> None:
        self.body = body
        self.samples = [_Sample() for _ in range(body.n)]
        self.accepted: messages.TurnAccepted | None = None
        self.refused: BadRequest | None = None
        self.readers = 0
        self.asked_at = 0.0
        self._first: int | None = None  # the turn's first sample: its others are numbered on from it
        self._news = asyncio.Event()

    @property
    def whole(self) -> bool:
        return all(sample.finish for sample in self.samples)

    @property
    def settled(self) -> bool:
        """Nothing more will come."""
        return self.refused is not None or (self.whole and self.accepted is not None)

    def notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait_accepted(self) -> messages.TurnAccepted:
        """Raises `BadRequest` where the daemon refused it."""
        while self.accepted is None:
            if self.refused is not None:
                raise self.refused
            await self._news.wait()
        return self.accepted

    async def pieces(self, *, raw: bool) -> AsyncIterator[Piece]:
        """New tokens, each once, until all samples have ended. Raises `BadRequest` where one cannot. `raw`: with the raw model's
        logprobs.
        """
        at, ended = [0] * self.body.n, [False] * self.body.n
        while not all(ended):
            news = self._news  # before looking, so that nothing is missed
            for index, sample in enumerate(self.samples):
                begin, end = at[index], len(sample.tokens)
                if ended[index] or (end == begin and not sample.finish):
                    continue
                at[index], ended[index] = end, bool(sample.finish)
                logprobs = sample.raw_logprobs if raw else sample.logprobs
                yield Piece(
                    index, sample.tokens[begin:end], logprobs[begin:end], begin, sample.version, sample.finish
                )
            if self.refused is not None:
                raise self.refused
            if not all(ended):
                await news.wait()

    @property
    def begun(self) -> bool:
        """Something of it is here."""
        return any(sample.tokens or sample.finish for sample in self.samples)

    def refuse(self, refused: BadRequest) -> None:
        self.refused = self.refused or refused
        self.notify()

    def accept(self, accepted: messages.TurnAccepted) -> None:
        """The daemon has the turn. Another one than before may not go on from what is here."""
        before, self.accepted = self.accepted, accepted
        another = before is not None and before.turn_id != accepted.turn_id
        if before is not None and another and (self.begun or before.prompt_sha256 != accepted.prompt_sha256):
            self.refuse(_made_again())
        self.notify()

    def take(self, message: messages.TurnTokens) -> bool:
        """Add what is new; False when tokens before it are missing."""
        if message.index >= len(self.samples) or self.refused is not None:
            return True
        first = message.sample_id - message.index
        if self._first != first and self.begun:
            self.refuse(_made_again())
            return True
        self._first = first
        sample = self.samples[message.index]
        if message.error is not None:
            self.refuse(BadRequest(f"the turn was given up: {message.error}", 500, "server_error"))
            return True
        have, end = len(sample.tokens), message.offset + len(message.tokens) // 4
        if message.offset > have:
            return False
        new = 4 * (have - message.offset)
        if end > have:
            sample.tokens.extend(messages.unpack_tokens(message.tokens[new:]))
            sample.logprobs.extend(messages.unpack_logprobs(message.logprobs[new:]))
            sample.raw_logprobs.extend(messages.unpack_logprobs(message.raw_logprobs[new:]))
            sample.version = message.version
        if message.finish and len(sample.tokens) == end:
            sample.finish = message.finish
        self.notify()
        return True


class Link:
    """See the module. `run` serves until it is cancelled."""

    def __init__(self, state_dir: Path, key: keys.KeyPair, run: str) -> None:
        self._state_dir, self._key, self._run = state_dir, key, run
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._rendezvous: keys.Rendezvous | None = None
        self._timeout = ClientTimeout(time.monotonic())
        self._next_id = 1
        self._calls: dict[int, TurnStream | asyncio.Future[messages.ReplyBody] | None] = {}
        self._told = ""  # the reason of the last refusal that nobody waited for
        self._known = False  # the daemon has taken a call: the run is open
        self._turns: dict[bytes, TurnStream] = {}
        self._asked: dict[Repeated, asyncio.Future[messages.ReplyBody]] = {}
        self.connected = False

    # ---------------------------------------------------------------- what the app does

    @contextlib.asynccontextmanager
    async def open(self, body: messages.OpenTurn) -> AsyncIterator[TurnStream]:
        """Follow the turn of a request, which is made unless there is one. Leaving the block leaves the turn to the daemon."""
        turn = self._turns.get(body.request)
        if turn is not None and turn.body.content != body.content:
            raise BadRequest("this request's name was given to another one", *DENIED["conflict"])
        if turn is None or turn.refused is not None:
            turn = self._turns[body.request] = TurnStream(body)
            self._ask(turn)
        turn.readers += 1
        try:
            yield turn
        finally:
            turn.readers -= 1
            if not turn.readers and self._turns.get(body.request) is turn:
                del self._turns[body.request]

    async def end_episode(self, episode: str) -> None:
        """Returns once that is durable. Raises `BadRequest`."""
        await self._answer_to(messages.EndEpisode(episode))

    async def tool(self, body: messages.AskTool | messages.AnswerTool) -> messages.ToolState:
        """What the ledger has of a tool's call, once that is durable. Raises `BadRequest`."""
        reply = await self._answer_to(body)
        if not isinstance(reply, messages.ToolState):
            raise BadRequest(f"the daemon answered with {type(reply).__name__}", 503, "server_error")
        return reply

    async def _answer_to(self, body: Repeated) -> messages.ReplyBody:
        future = self._asked.get(body)
        if future is None:
            future = self._asked[body] = asyncio.get_running_loop().create_future()
            self._call(body, future)
        try:
            async with asyncio.timeout(GIVE_UP_S):
                while not future.done():
                    await asyncio.wait([future], timeout=ASK_AGAIN_S)
                    if not future.done():  # the call or its reply may have been lost
                        self._call(body, future)
        except TimeoutError:
            raise BadRequest("the daemon does not answer: try again", 503, "server_error") from None
        finally:
            if future.done() and self._asked.get(body) is future:
                del self._asked[body]
        reply = future.result()
        if isinstance(reply, messages.Denied):
            raise _refusal(reply)
        return reply

    @property
    def open_turns(self) -> int:
        return len(self._turns)

    # ---------------------------------------------------------------- the connection

    async def run(self) -> None:
        """Connect, serve, and connect again, until cancelled."""
        tries = 0
        try:
            while True:
                try:
                    self._connect()
                    await self._serve()
                except (
                    ScavengerError,
                    OSError,
                    zmq.ZMQError,
                ) as error:  # an unreadable file, a frame that is none
                    tries = 1 if self.connected else tries + 1
                    if tries == 1:
                        cause, remedy = getattr(error, "cause", str(error)), getattr(error, "remedy", "")
                        log.warning("no daemon", cause=cause, remedy=remedy)
                    self.connected = False
                    await asyncio.sleep(backoff_s(0.1, 2.0, tries))
                else:
                    tries = 0
        finally:
            self._drop()
            self._context.term()

    def _connect(self) -> None:
        rendezvous = keys.read_rendezvous(self._state_dir)
        self._drop()
        socket = self._context.socket(zmq.DEALER)
        keys.secure(socket, rendezvous.server_key, self._key)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(rendezvous.endpoint)
        self._socket, self._rendezvous = socket, rendezvous
        self._timeout.connected(time.monotonic())
        self._calls.clear()
        for turn in self._turns.values():
            if not turn.settled:
                self._ask(turn)
        for body, future in self._asked.items():
            self._call(body, future)

    def _drop(self) -> None:
        self.connected = False
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    async def _serve(self) -> None:
        """Until this connection is given up."""
        socket = self._socket
        assert socket is not None
        pinged_at = 0.0
        while True:
            now = time.monotonic()
            if now - pinged_at >= PING_S:
                pinged_at = now
                self._call(messages.GatewayPing(), None)
                for turn in list(self._turns.values()):
                    if not turn.settled and now - turn.asked_at > ASK_AGAIN_S:
                        self._ask(turn)
                silent = self._timeout.silence(now)
                if silent > self._timeout.limit or (silent > MIN_TIMEOUT_S / 4 and self._is_elsewhere()):
                    self._timeout.gave_up()
                    return
            if not await socket.poll(int(1000 * PING_S / 2)):
                continue
            while True:  # what has come, and then the loop's others
                try:
                    frame = await socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if not self._take(messages.decode_to_trainer(frame)):
                    return
            await asyncio.sleep(0)

    def _is_elsewhere(self) -> bool:
        try:
            return keys.read_rendezvous(self._state_dir) != self._rendezvous
        except DaemonUnavailable:
            return False

    def _take(self, message: messages.ToTrainer) -> bool:
        """False: this connection is of no use."""
        self._timeout.heard(time.monotonic(), group=False)
        match message:
            case messages.TurnTokens(request=request):
                turn = self._turns.get(request)
                if turn is not None:
                    turn.asked_at = time.monotonic()
                    if not turn.take(message):
                        self._ask(turn)
            case messages.Reply(id=call_id, body=body):
                self.connected = True
                self._answered(self._calls.pop(call_id, None), body)
            case messages.HelloAgain() | messages.Rejected():
                log.warning("the daemon refused this gateway", cause=message.reason)
                return False
        return True

    def _answered(
        self, caller: TurnStream | asyncio.Future[messages.ReplyBody] | None, body: messages.ReplyBody
    ) -> None:
        if isinstance(caller, TurnStream):
            if isinstance(body, messages.TurnAccepted):
                caller.accept(body)
            elif isinstance(body, messages.Denied):
                caller.refuse(_refusal(body))
        elif caller is not None and not caller.done():
            caller.set_result(body)
        elif not isinstance(body, messages.Denied):
            self._told, self._known = "", True
        elif body.reason != self._told:  # the ping of each second
            self._told = body.reason
            if (
                body.code == "unknown-run" and not self._known
            ):  # a gateway starts before its training job opens the run
                log.info("waiting until the training job opens the run", run=self._run)
            else:
                log.warning("the daemon refused a call", cause=body.reason, remedy=body.remedy)

    def _ask(self, turn: TurnStream) -> None:
        turn.asked_at = time.monotonic()
        have = tuple(len(sample.tokens) for sample in turn.samples)
        self._call(msgspec.structs.replace(turn.body, have=have), turn)

    def _call(
        self, body: messages.CallBody, caller: TurnStream | asyncio.Future[messages.ReplyBody] | None
    ) -> None:
        """Send, where there is a connection; the next one sends again what is not answered."""
        if self._socket is None:
            return
        call = messages.Call(self._next_id, self._run, 0, body)
        self._next_id += 1
        self._calls[call.id] = caller
        if len(self._calls) > 65_536:  # replies of turns that nobody waits for any more
            del self._calls[next(iter(self._calls))]
        self._socket.send(messages.encode(call))  # without a high-water mark it is taken at once


def _made_again() -> BadRequest:
    return BadRequest("the turn was given up and begun anew: ask again", 500, "server_error")


def _refusal(denied: messages.Denied) -> BadRequest:
    status, kind = DENIED.get(denied.code, (503, "server_error"))
    return BadRequest(f"{denied.reason}: {denied.remedy}" if denied.remedy else denied.reason, status, kind)
