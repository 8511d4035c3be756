"""Agents' model calls on their way from an environment worker to the run's gateway: each gets its episode's key and its name.

    agent (harness) --> interception of `verifiers` --> TrainClient --> relay --> gateway --> engines

`TrainClient` names the agent's rollout in `X-Session-ID`, the same for every call. The relay knows whose rollout that is, counts its calls
(`naming`), and asks the gateway under the episode's key with the call's name as `X-Request-Id`. So keys stay in this process, a call that
is repeated is generated once, and an episode that is played again gets its recorded answers. It waits while gateway or daemon are away.

Tools are reached through it too, by `tool`'s addresses (`tools`), where a run's tools have effects outside or its agents are in sandboxes.

It listens on loopback, on a port that the system chooses; a call of an unknown rollout is refused.

Boundary: HTTP within a worker; starlette, uvicorn and httpx2 come with `scavenger[gateway]` and with `verifiers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from scavenger.asyncio_helpers import listening_socket
from scavenger.backoff import backoff_s
from scavenger.protocol.messages import BUDGET_SPENT
from trainer.episodes import naming, tools, wire
from trainer.episodes.naming import Calls, Setting

SESSION = "x-session-id"
#: By which the gateway knows that another run answers for an agent.
POLICY = "x-scavenger-policy"
#: Of a tool server without a name, in addresses.
NAMELESS = "-"
#: What the package sends along and the gateway has no use for: of sampling, and of the body.
DROPPED_SAMPLING, DROPPED = ("routed_experts_prompt_start",), ("cache_salt", "priority")
#: As the gateway's own largest.
MOST_BODY_BYTES = 16 << 20
#: How many of these the calls of one episode hold together, and how many of its tools are asked at once.
MOST_BODIES, MOST_ASKED = 4, 64
#: The gateway is away, or full, or made the turn anew: asked again for as long.
AWAY_S = 900.0
WAITS = (429, 500, 503)
#: Answers of 500 in a row that end the call: the turn was given up each time.
MOST_GIVEN_UP = 3


@dataclass(slots=True)
class Playing:
    """An episode that is played. `ended`: why it is over before its environment says so."""

    episode: str
    key: str
    setting: Setting
    calls: Calls = field(default_factory=Calls)
    agents: dict[str, int] = field(default_factory=dict)  # by rollout, in the order in which they began
    policies: dict[int, str] = field(default_factory=dict)  # by agent: the other run that answers for it
    versions: dict[tuple[int, int], int] = field(default_factory=dict)  # of the weights, by agent and number
    seconds: float = 0.0  # that its calls took, added up
    seconds_waited: float = 0.0  # in which at least one of its calls was under way
    calling: int = 0  # calls under way
    calling_since: float = 0.0  # since when there is one
    notes: list[str] = field(default_factory=list)
    ended: naming.End | None = None
    stops: dict[int, Callable[[str], None]] = field(default_factory=dict)  # by agent: how it is ended
    stopped_by: str = ""  # what ended its agents before their own end
    recorder: tools.Recorder | None = None  # where its tools' effects are outside
    servers: dict[tuple[str, str], tools.Server] = field(default_factory=dict)  # by rollout and name
    asking: dict[str, asyncio.Task[dict[str, Any]]] = field(
        default_factory=dict
    )  # tools, by their calls' names
    held: int = 0  # bytes of the bodies of its calls

    def taken(self, policy: str = "") -> list[tuple[str, int]]:
        """The calls that this run answered, or the other run `policy`, with the version that answered each."""
        return [
            (call.name, self.versions[place])
            for place, call in sorted(self.calls.taken.items())
            if self.policies.get(place[0], "") == policy
        ]

    @contextlib.contextmanager
    def timed(self, clock: Callable[[], float] = time.monotonic) -> Generator[None, None, None]:
        """A model call."""
        started = clock()
        if not self.calling:
            self.calling_since = started
        self.calling += 1
        try:
            yield
        finally:
            self.calling -= 1
            self.seconds += clock() - started
            if not self.calling:
                self.seconds_waited += clock() - self.calling_since

    def end_over_budget(self, agent: int) -> None:
        """The episode has used up its budget: the agent ends here, and what was said is rewarded."""
        self.stopped_by = wire.OVER_BUDGET
        if (stop := self.stops.get(agent)) is not None:
            stop(wire.OVER_BUDGET)


class _Server(uvicorn.Server):
    """Signals are the worker's own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Relay:
    """`begin` an episode, name its rollouts as they begin (`agent`), `end` it. `base_url` is for `TrainClient`."""

    def __init__(self, gateway: str, model: str, context_length: int) -> None:
        self._gateway, self._model, self._context_length = gateway.rstrip("/"), model, context_length
        self._by_rollout: dict[str, Playing] = {}
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        self._http = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=10.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self.base_url = ""

    def begin(
        self,
        episode: str,
        key: str,
        setting: Setting,
        external: tools.OnDoubt | None = None,
        seconds: float = 0.0,
    ) -> Playing:
        """`external`: its tools' effects are outside, and what becomes of a call in doubt. `seconds`: an agent's longest."""
        playing = Playing(episode, key, setting)
        if external is not None:
            asker = secrets.token_hex(16)
            playing.recorder = tools.Recorder(
                self._gateway, episode, key, asker, self._http, external, seconds=seconds
            )
        return playing

    def tool(self, rollout: str, name: str, url: str) -> str:
        """The address by which a rollout that has begun reaches a tool's server at `url`."""
        self._by_rollout[rollout].servers[rollout, name or NAMELESS] = tools.Server(name, url)
        return f"{self.base_url}/tools/{rollout}/{name or NAMELESS}"

    def agent(
        self, playing: Playing, rollout: str, policy: str = "", *, stop: Callable[[str], None] | None = None
    ) -> int:
        """A rollout of the episode begins, for which the run `policy` answers, "" for this one. Its number among them.

        `stop`: ends it well, by a reason; called before a call of it is refused because the episode has used up its budget.
        """
        number = playing.agents.setdefault(rollout, len(playing.agents))
        if policy:
            playing.policies[number] = policy
        if stop is not None:
            playing.stops[number] = stop
        self._by_rollout[rollout] = playing
        return number

    def end(self, playing: Playing) -> None:
        for rollout in playing.agents:
            self._by_rollout.pop(rollout, None)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Relay]:
        routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/inference/v1/generate", self._call, methods=["POST"]),
            Route("/v1/chat/completions", self._call, methods=["POST"]),
            Route("/tools/{rollout}/{server}", self._tool, methods=["GET", "POST", "DELETE"]),
        ]
        with listening_socket("127.0.0.1", 0) as listening:
            self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            config = uvicorn.Config(
                Starlette(routes=routes),
                http="h11",  # which bounds headers; a program of an agent's box may send any
                log_level="warning",
                access_log=False,
                lifespan="off",
            )
            server = _Server(config)
            task = asyncio.create_task(server.serve(sockets=[listening]))
            try:
                yield self
            finally:
                server.should_exit = True
                await task
                await self._http.aclose()

    async def _models(self, request: Request) -> Response:
        card = {"id": self._model, "object": "model", "max_model_len": self._context_length}
        return JSONResponse({"object": "list", "data": [card]})

    async def _call(self, request: Request) -> Response:
        rollout = request.headers.get(SESSION, "")
        playing = self._by_rollout.get(rollout)
        if playing is None:
            return _error(401, "no rollout of an episode that is played here")
        with _Held(playing) as held:
            try:
                body = _cleaned(await _read(request, held))
            except TooLarge as error:
                return _error(error.status, str(error))
            except (ValueError, RecursionError) as error:
                return _error(400, f"a body that cannot be passed on: {error}")
            call = playing.calls.next(playing.agents[rollout])
            with playing.timed():
                return await self._asked(playing, call, request.url.path, body)

    # ---------------------------------------------------------------- tools

    async def _tool(self, request: Request) -> Response:
        rollout, name = request.path_params["rollout"], request.path_params["server"]
        playing = self._by_rollout.get(rollout)
        server = playing.servers.get((rollout, name)) if playing is not None else None
        if playing is None or server is None:
            return _error(401, "no tools of a rollout that is played here")
        with _Held(playing) as held:
            try:
                body, headers = await _read(request, held), tools.forwarded(request.headers)
            except TooLarge as error:
                return _error(error.status, str(error))
            recorded = playing.recorder is not None and request.method == "POST"
            if recorded:
                if playing.ended is not None:
                    return _error(400, playing.ended.reason)
                try:
                    body = tools.checked(body)
                except tools.Unreadable as error:
                    return _error(400, str(error))
                headers["content-type"] = "application/json"
            made = self._http.build_request(
                request.method, tools.target(server, request.url.query), content=body, headers=headers
            )
            if recorded and tools.call_of(body) is not None:
                return await self._recorded(
                    playing, playing.agents[rollout], server, request, made, body, held
                )
            try:
                reply = await self._http.send(made, stream=True)
            except httpx2.TransportError as error:
                return _error(502, f"the tool's server is away: {type(error).__name__}")
            return StreamingResponse(tools.streamed(reply), reply.status_code, tools.returned(reply.headers))

    def _over(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it

    async def _recorded(
        self,
        playing: Playing,
        agent: int,
        server: tools.Server,
        request: Request,
        made: httpx2.Request,
        body: bytes,
        held: _Held,
    ) -> Response:
        """Answer a call of a tool that is asked once. Whoever hangs up leaves the call running, and finds it when it asks again."""
        assert playing.recorder is not None
        number, tool, arguments = tools.call_of(body) or (None, "", None)
        digest = tools.digest_of(server.name, tool, arguments)
        place = playing.recorder.calls.take(agent, digest)
        name, shown = f"{agent}.{digest}.{place}", False
        task = playing.asking.get(name)
        if task is None:
            if sum(not one.done() for one in playing.asking.values()) >= MOST_ASKED:
                playing.recorder.calls.give_back(agent, digest, place, shown=False)
                return _error(429, f"{MOST_ASKED} of this episode's tools are asked already")
            task = asyncio.create_task(
                tools.recorded(playing.recorder, self._http, server, name, made, body), name=name
            )
            playing.asking[name] = task
            self._tasks.add(task)  # it is recorded whoever still wants it
            task.add_done_callback(self._over)
            task.add_done_callback(held.passed_on())
        gone = asyncio.create_task(_hung_up(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return Response(status_code=499)
            found = task.result()
            shown = not gone.done() and not tools.unanswered(found)
            return JSONResponse({"jsonrpc": "2.0", "id": number, **found})
        except tools.InDoubt as doubt:
            playing.ended = playing.ended or doubt.end
            return _error(400, doubt.end.reason)
        except tools.Refused as refused:
            if refused.status == 410:
                playing.ended = naming.End(True, "the ledger has ended an episode of this name", gone=True)
            return _error(400, str(refused))
        finally:
            gone.cancel()
            if task.done():
                playing.asking.pop(name, None)
            playing.recorder.calls.give_back(agent, digest, place, shown=shown)

    # ---------------------------------------------------------------- the model

    async def _asked(self, playing: Playing, call: naming.Call, path: str, body: bytes) -> Response:
        give_up, tries, given_up = time.monotonic() + AWAY_S, 0, 0
        while playing.ended is None:
            headers = {
                "authorization": f"Bearer {playing.key}",
                "x-request-id": call.name,
                "content-type": "application/json",
            }
            if policy := playing.policies.get(call.agent):
                headers[POLICY] = policy
            tries += 1
            try:
                answer = await self._http.post(f"{self._gateway}{path}", content=body, headers=headers)
            except httpx2.TransportError as error:
                status, text = 503, f"no gateway: {type(error).__name__}"
            else:
                status, text = answer.status_code, answer.text
            if status == 200:
                playing.calls.answered(call)
                playing.versions[call.agent, call.number] = version_of(text)
                return Response(answer.content, media_type="application/json")
            given_up += status == 500
            if status in WAITS and given_up < MOST_GIVEN_UP and time.monotonic() < give_up:
                await asyncio.sleep(backoff_s(0.1, 5.0, tries))
                continue
            if status == 409:
                found = playing.calls.conflict(call, playing.setting)
                if isinstance(found, naming.Branch):
                    playing.notes.append(found.reason)
                    call, tries = playing.calls.branched(call), 0
                    continue
                playing.ended = found
            elif status == 410:
                playing.ended = naming.End(True, "the ledger has ended an episode of this name", gone=True)
            else:
                if is_budget_spent(status, text):
                    playing.end_over_budget(call.agent)
                return Response(text, status, media_type="application/json")
        assert playing.ended is not None
        return _error(400, playing.ended.reason)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "episode_error", "code": status}}, status)


class TooLarge(Exception):
    """A body that no server here takes, or (`status` 429) not now."""

    def __init__(self, why: str, status: int = 413) -> None:
        super().__init__(why)
        self.status = status


class _Held:
    """What the body of one call holds of its episode's room, until the call is over."""

    def __init__(self, playing: Playing) -> None:
        self._playing, self._nbytes = playing, 0

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._playing.held, self._nbytes = self._playing.held - self._nbytes, 0

    def take(self, nbytes: int) -> None:
        """Raises `TooLarge`."""
        most = MOST_BODIES * MOST_BODY_BYTES
        if self._playing.held + nbytes > most:
            raise TooLarge(f"bodies of this episode's calls hold over {most:,} bytes", 429)
        self._playing.held += nbytes
        self._nbytes += nbytes

    def passed_on(self) -> Callable[[object], None]:
        """The call goes on without its request: what gives the room back then."""
        later = _Held(self._playing)
        later._nbytes, self._nbytes = self._nbytes, 0
        return later.__exit__


async def _read(request: Request, held: _Held) -> bytes:
    """The body. Raises `TooLarge`: what an agent's programs send must not take this process's memory, which others share."""
    body = bytearray()
    async for part in request.stream():
        held.take(len(part))
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise TooLarge(f"a body of over {MOST_BODY_BYTES:,} bytes")
    return bytes(body)


async def _hung_up(request: Request) -> None:
    """Until the caller of a request whose body was read is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cleaned(body: bytes) -> bytes:
    """Without what the gateway refuses by its name and this run has no use for. Raises `ValueError`, `RecursionError`."""
    asked = json.loads(body)
    if not isinstance(asked, dict):
        raise ValueError(f"it is of type {type(asked).__name__}")
    if asked.get("stream"):
        raise ValueError("stream: not here, since a call may be asked for again meanwhile")
    for key in DROPPED:
        asked.pop(key, None)
    sampling = asked.get("sampling_params")
    if isinstance(sampling, dict):
        for key in DROPPED_SAMPLING:
            sampling.pop(key, None)
    return json.dumps(asked).encode()


def is_budget_spent(status: int, text: str) -> bool:
    """Whether the gateway refused a call since its episode has used up its budget."""
    if status != 400:
        return False
    try:
        return bool(json.loads(text)["error"]["type"] == BUDGET_SPENT)
    except (ValueError, LookupError, TypeError):
        return False


def version_of(text: str) -> int:
    """The version of the weights that an answer of the gateway names; -1: none (of chat, say)."""
    choices = json.loads(text).get("choices") or [{}]
    spans = choices[0].get("weight_versions") or [{}]
    return int(spans[0].get("version", -1))
