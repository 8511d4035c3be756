"""`scavenger guest-proxy`: passes an inference service's requests on, and tells its guest each latency as it is.

    callers --HTTP--> proxy --HTTP--> service
                        |  /scavenger/metrics: latencies seen here, in narrow buckets; the service's own queue
                      guest

Every request goes to the service as it came, and every reply back, part by part. Nothing is kept of either but when parts of
streamed replies came. It is a process of its own: a guest that ends or is killed leaves it at work. It ends when it is told to, once
the replies under way are whole.

Boundary: starlette, uvicorn and httpx2 (the extra `guest`) are imported here and nowhere else in this folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from scavenger.asyncio_helpers import HungUp, listening_socket, unless_gone
from scavenger.errors import ConfigError
from scavenger.guest import service
from scavenger.guest.latencies import Latencies, events
from scavenger.guest.metrics import ServiceError, ServiceReading
from scavenger.guest.service import PROXY_METRICS, ServiceGone
from scavenger.host import descriptors

#: RFC 9110, 7.6.1: of one connection, not of the message. `Connection` names more of them.
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
CONNECT_S = 10.0
#: For which an idle connection is used again: less than the 5 s after which uvicorn, and so vLLM and SGLang, closes it.
IDLE_S = 2.0
#: For the service's own page of metrics.
PAGE_S = 2.0
#: For so long a reading of it counts: however often our page is asked for, the service's is not.
READ_AGAIN_S = 0.05
#: For replies under way when it is told to end.
LEAVE_S = 600

Headers = list[tuple[bytes, bytes]]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that a proxy passes on: all but those of one connection. Names in lower case.

    A message in chunks has no length (RFC 9112, 6.3): one that is stated too would part two messages elsewhere than the chunks do.
    """
    named = [(name.lower(), value) for name, value in headers]
    listed = {
        word.strip().lower() for name, value in named if name == b"connection" for word in value.split(b",")
    }
    if any(name == b"transfer-encoding" for name, _ in named):
        listed.add(b"content-length")
    return [(name, value) for name, value in named if name not in _HOP_BY_HOP and name not in listed]


class _Call(httpx2.AsyncByteStream):
    """A caller's request, as the body of ours. `asked_at`: when all of it had come."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.asked_at = time.monotonic()
        self.passed_on = asyncio.Event()
        self.sends = any(
            name in (b"content-length", b"transfer-encoding") for name, _ in request.scope["headers"]
        )

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.sends:
            async for part in self.request.stream():
                yield part
        self.asked_at = time.monotonic()
        self.passed_on.set()

    async def receive(self) -> Message:
        """What comes after the body."""
        await self.passed_on.wait()
        return await self.request.receive()


class Proxy:
    """Owns the connections to the service, and the latencies of what passes."""

    def __init__(self, service_url: str) -> None:
        self._metrics_url = service.metrics_url(service_url)
        self._base = httpx2.URL(service_url)
        self._prefix = self._base.raw_path.rstrip(b"/")
        self._latencies = Latencies()
        self._numbers = itertools.count()
        self._reading: asyncio.Task[ServiceReading] | None = None
        self._read_at = 0.0
        # No client: one would keep callers' cookies, and tidy paths up.
        self._http = httpx2.AsyncHTTPTransport(
            trust_env=False,
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_S
            ),
        )

    def app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            async with self._http:
                yield

        app = Starlette(routes=[Route(PROXY_METRICS, self._metrics, methods=["GET"])], lifespan=lifespan)
        app.router.redirect_slashes = False
        app.router.default = self._pass  # a route would know methods, and paths without line breaks
        return app

    async def _metrics(self, _request: Request) -> Response:
        now = time.monotonic()
        if self._reading is None or (self._reading.done() and now - self._read_at > READ_AGAIN_S):
            reading = asyncio.to_thread(service.fetch, self._metrics_url, PAGE_S)
            self._reading, self._read_at = asyncio.create_task(reading), now
        try:
            page = self._latencies.page(await asyncio.shield(self._reading), time.monotonic())
        except ServiceGone as error:
            return PlainTextResponse(f"{error}\n", 410)
        except ServiceError as error:
            return PlainTextResponse(f"{error}\n", 502)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = _Call(Request(scope, receive))
        with contextlib.suppress(ClientDisconnect, HungUp):  # the service is told, and nobody reads a reply
            await unless_gone(call.receive, self._exchange(call, send))

    async def _exchange(self, call: _Call, send: Send) -> None:
        scope = call.request.scope
        if not scope["raw_path"].startswith(b"/"):
            await _say(call, send, "the target of a request is a path\n", 400)
            return
        try:
            reply = await self._http.handle_async_request(self._passed(call))
        except httpx2.TransportError as error:
            await _say(call, send, f"the service cannot be reached: {error}\n", 502)
            return
        call.passed_on.set()  # or the service did not want all of it
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": reply.status_code,
                    "headers": end_to_end(reply.headers.raw),
                }
            )
            parts = self._timed(reply, call.asked_at) if _has_tokens(reply) else reply.aiter_raw()
            async with contextlib.aclosing(parts):
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx2.TransportError:
            return  # in the midst of a reply: its caller's connection is closed before the end, and a line is logged
        finally:
            await reply.aclose()  # the service does not work for nobody

    def _passed(self, call: _Call) -> httpx2.Request:
        """The request to the service. Its target is the caller's to the letter."""
        scope = call.request.scope
        headers = end_to_end(scope["headers"])
        names = {name for name, _ in headers}
        if b"host" not in names:  # HTTP/1.0
            headers.append((b"host", self._base.netloc))
        if call.sends and b"content-length" not in names:
            headers.append((b"transfer-encoding", b"chunked"))
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        return httpx2.Request(
            scope["method"],
            self._base,
            headers=headers,
            stream=call,
            extensions={
                "target": self._prefix + scope["raw_path"] + query,
                "timeout": {"connect": CONNECT_S},
            },
        )

    async def _timed(self, reply: httpx2.Response, asked_at: float) -> AsyncGenerator[bytes]:
        number, latencies = next(self._numbers), self._latencies
        latencies.begun(number, asked_at)
        try:
            async for part in reply.aiter_raw():
                latencies.came(number, events(part), time.monotonic())
                yield part
        finally:
            latencies.ended(number)


def _has_tokens(reply: httpx2.Response) -> bool:
    """Whether it is a stream of events that can be read as it passes."""
    return (
        reply.status_code == httpx2.codes.OK
        and reply.headers.get("content-type", "").lower().startswith("text/event-stream")
        and reply.headers.get("content-encoding", "identity") == "identity"
    )


async def _say(call: _Call, send: Send, what: str, status: int) -> None:
    await PlainTextResponse(what, status)(call.request.scope, call.request.receive, send)


def serve(service_url: str, host: str, port: int) -> None:
    """Until SIGTERM or SIGINT. Raises `ConfigError`."""
    proxy = Proxy(service_url)
    try:
        listening = listening_socket(
            host, port
        )  # before it is said: who reads the address may use it at once
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened at: {error.strerror}", "give another --listen"
        ) from error
    name, number = listening.getsockname()[:2]
    where = f"http://{f'[{name}]' if ':' in name else name}:{number}"
    print(f"serves {where}; the guest's --service is {where}{PROXY_METRICS}", flush=True)
    descriptors.raise_limit()  # two for each request: its caller's connection, and the one to the service
    config = uvicorn.Config(
        proxy.app(),
        http="h11",  # whatever else is there: it bounds headers, and reads the body of a request that asks for an upgrade
        access_log=False,
        log_level="error",  # not a line for each request that is malformed, or asks for a web socket
        server_header=False,  # the service's own
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LEAVE_S,
        ws="none",
    )
    with listening, contextlib.suppress(KeyboardInterrupt):  # uvicorn raises again what ended it
        uvicorn.Server(config).run(sockets=[listening])
