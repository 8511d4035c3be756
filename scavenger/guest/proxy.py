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
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from scavenger.asyncio_helpers import listening_socket
from scavenger.errors import ConfigError
from scavenger.guest import service
from scavenger.guest.latencies import Latencies, events
from scavenger.guest.metrics import ServiceError
from scavenger.guest.service import PROXY_METRICS, ServiceGone

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
#: For the service's own page of metrics.
PAGE_S = 2.0
#: For replies under way when it is told to end.
LEAVE_S = 600
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

Headers = list[tuple[bytes, bytes]]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that a proxy passes on: all but those of one connection. Names in lower case."""
    named = [(name.lower(), value) for name, value in headers]
    listed = {
        word.strip().lower() for name, value in named if name == b"connection" for word in value.split(b",")
    }
    return [(name, value) for name, value in named if name not in _HOP_BY_HOP and name not in listed]


class Proxy:
    """Owns the connections to the service, and the latencies of what passes."""

    def __init__(self, service_url: str) -> None:
        self._metrics_url = service.metrics_url(service_url)
        self._base = httpx2.URL(service_url)
        self._prefix = self._base.raw_path.rstrip(b"/")
        self._latencies = Latencies()
        self._numbers = itertools.count()
        self._http = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
            follow_redirects=False,
        )

    def app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            async with self._http:
                yield

        routes = [
            Route(PROXY_METRICS, self._metrics, methods=["GET"]),
            Route("/{path:path}", self._pass, methods=list(METHODS)),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def _metrics(self, _request: Request) -> Response:
        try:
            reading = await asyncio.to_thread(service.fetch, self._metrics_url, PAGE_S)
        except ServiceGone as error:
            return PlainTextResponse(f"{error}\n", 410)
        except ServiceError as error:
            return PlainTextResponse(f"{error}\n", 502)
        return Response(
            self._latencies.page(reading, time.monotonic()),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def _pass(self, request: Request) -> Response:
        asked_at = time.monotonic()
        scope = request.scope
        path = (
            self._prefix
            + scope["raw_path"]
            + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        )
        headers = end_to_end(scope["headers"])
        sends = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        passed = self._http.build_request(
            request.method,
            self._base.copy_with(raw_path=path),
            headers=headers,
            content=request.stream() if sends else None,
        )
        for name in (
            set(passed.headers) - {name.decode("latin-1") for name, _ in headers} - {"transfer-encoding"}
        ):
            del passed.headers[name]  # what a client of its own would say of itself
        try:
            reply = await self._http.send(passed, stream=True)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except httpx2.TransportError as error:
            return PlainTextResponse(f"the service cannot be reached: {error}\n", 502)
        streams = (
            reply.headers.get("content-type", "").startswith("text/event-stream")
            and reply.status_code == httpx2.codes.OK
        )
        parts = self._timed(reply, asked_at) if streams else reply.aiter_raw()
        answer = StreamingResponse(_whole(reply, parts), reply.status_code)
        answer.raw_headers = end_to_end(reply.headers.raw)
        return answer

    async def _timed(self, reply: Any, asked_at: float) -> AsyncIterator[bytes]:
        number, latencies = next(self._numbers), self._latencies
        latencies.begun(number, asked_at)
        try:
            async for part in reply.aiter_raw():
                latencies.came(number, events(part), time.monotonic())
                yield part
        finally:
            latencies.ended(number)


async def _whole(reply: Any, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The parts; the connection to the service is closed where its caller leaves, so that the service stops working for nobody."""
    try:
        async for part in parts:
            yield part
    finally:
        await reply.aclose()


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
    config = uvicorn.Config(
        proxy.app(),
        access_log=False,
        log_level="warning",
        server_header=False,  # the service's own
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LEAVE_S,
        ws="none",
    )
    with listening, contextlib.suppress(KeyboardInterrupt):  # uvicorn raises again what ended it
        uvicorn.Server(config).run(sockets=[listening])
