"""The proxy before a service: what passes, when, and which latencies it tells.

The service is a real HTTP server (uvicorn) that streams as it is told to; what is mocked is the model behind it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra [guest]")
httpx2 = pytest.importorskip("httpx2", reason="needs the extra [guest]")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra [guest]")
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest  # noqa: E402  after what may be missing
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import Response, StreamingResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from scavenger.asyncio_helpers import listening_socket  # noqa: E402
from scavenger.guest.latencies import LATELY_S, MISSED, Latencies, events  # noqa: E402
from scavenger.guest.metrics import Histogram as Read  # noqa: E402
from scavenger.guest.metrics import ServiceError, ServiceReading, parse  # noqa: E402
from scavenger.guest.proxy import READ_AGAIN_S, end_to_end  # noqa: E402
from scavenger.guest.service import PROXY_METRICS, ServiceGone, fetch, metrics_url  # noqa: E402

DEADLINE_S = 60.0
NOTHING = ServiceReading("vLLM", Read(), Read(), 0, 0, 0.0)


def wait_for(what: str, condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)  # between two looks at the condition


# ---------------------------------------------------------------- pure


def test_headers_of_one_connection_are_not_passed_on() -> None:
    given = [
        (b"Host", b"a"),
        (b"Connection", b"close, X-Mine"),
        (b"x-mine", b"1"),
        (b"TE", b"trailers"),
        (b"Authorization", b"Bearer k"),
    ]
    assert end_to_end(given) == [(b"host", b"a"), (b"authorization", b"Bearer k")]


@pytest.mark.parametrize(
    ("part", "count"),
    [
        (b'data: {"a": 1}\n\n', 1),
        (b"data: {}\n\ndata: {}\n\ndata: [DONE]\n\n", 2),
        (b"event: x\r\ndata:{}\r\n\r\n: comment\n\n", 1),
        (b" the rest of a long event\n\n", 0),
        (b"data: [DONE]\n\n", 0),
        (b"", 0),
        (b"event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n", 0),
        (b"event: response.output_text.delta\ndata: {}\n\nevent: response.completed\ndata: {}\n\n", 1),
        (
            b"event: message_start\r\ndata: {}\r\n\r\nevent: content_block_delta\r\ndata: {}\r\n\r\ndata: {}\r\n",
            2,
        ),
    ],
)
def test_events_are_counted_where_they_begin(part: bytes, count: int) -> None:
    assert events(part) == count


def test_latencies_are_told_within_a_twentieth() -> None:
    seen = Latencies()
    for request in range(100):
        seen.begun(request, 10.0)
        seen.came(request, 0, 10.01)  # headers, or a comment: no token
        seen.came(request, 1, 10.0 + 0.120)
        seen.came(request, 2, 10.0 + 0.120 + 2 * 0.0123)
        seen.ended(request)
    read = parse(seen.page(NOTHING, 11.0))
    assert read.ttft.total == 100
    assert read.tpot.total == 200
    assert read.ttft.quantile(0.99) == pytest.approx(0.120, rel=0.05)
    assert read.tpot.quantile(0.99) == pytest.approx(0.0123, rel=0.05)
    assert read.oldest_s == 0.0


def test_the_oldest_stream_without_a_token_is_told_at_once() -> None:
    seen = Latencies()
    seen.begun(1, 5.0)
    seen.begun(2, 4.0)  # its headers came later
    assert parse(seen.page(NOTHING, 9.0)).oldest_s == pytest.approx(5.0)
    seen.came(2, 1, 9.0)
    assert parse(seen.page(NOTHING, 9.0)).oldest_s == pytest.approx(4.0)
    seen.ended(1)  # its caller left: it has no latency
    read = parse(seen.page(NOTHING, 9.0))
    assert (read.oldest_s, read.ttft.total) == (0.0, 1)


def counted(total: float) -> ServiceReading:
    whole = Read((0.5, float("inf")), (total, total))
    return ServiceReading("vLLM", whole, whole, 7, 3, 11.0)


def test_where_others_ask_the_service_directly_its_own_latencies_are_told() -> None:
    seen = Latencies()

    def stream(count: int) -> None:
        for request in range(count):
            seen.begun(request, 0.0)
            seen.came(request, 1, 0.1)
            seen.ended(request)

    stream(20)
    read = parse(seen.page(counted(1000.0), 1.0))  # what was before this process counts for nothing
    assert (read.waiting, read.running, read.tokens) == (7, 3, 11.0), "its queue is always its own"
    assert read.ttft.total == 20
    stream(20)
    assert parse(seen.page(counted(1000.0 + 20 + MISSED), 2.0)).ttft.total == 40
    read = parse(seen.page(counted(1000.0 + 40), 3.0))
    assert (read.ttft.bounds, read.ttft.total) == ((0.5, float("inf")), 1040.0)
    assert read.tpot.total == 1040.0


def test_however_often_its_page_is_asked_for_what_came_another_way_is_noticed() -> None:
    seen, bounds = Latencies(), []
    for tick in range(2000):
        # Nothing comes through here; the service counts a first token each second.
        bounds.append(len(parse(seen.page(counted(tick // 100), tick / 100)).ttft.bounds))
    assert bounds[0] > 2
    assert bounds[-1] == 2


def test_between_its_own_latencies_and_the_services_it_does_not_swing() -> None:
    seen = Latencies()
    exact = len(parse(seen.page(counted(0), 0.0)).ttft.bounds)
    assert len(parse(seen.page(counted(MISSED + 1), 1.0)).ttft.bounds) == 2
    for request in range(100):
        seen.begun(request, 1.0)
        seen.came(request, 1, 1.1)
        seen.ended(request)
    assert len(parse(seen.page(counted(104), 2.0)).ttft.bounds) == 2, "most come through here now"
    assert len(parse(seen.page(counted(104), 1.0 + LATELY_S)).ttft.bounds) == exact


def test_a_service_that_was_started_again_is_counted_anew() -> None:
    seen = Latencies()
    seen.page(counted(1000), 0.0)
    seen.page(counted(0), 1.0)
    assert len(parse(seen.page(counted(MISSED + 1), 2.0)).ttft.bounds) == 2


# ---------------------------------------------------------------- with a server


@dataclass
class Upstream:
    """`release`: parts that each stream may send now. `left`: streams whose caller left. `asked`: what came."""

    url: str = ""
    release: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    whole: int = 0
    pages: int = 0

    def app(self) -> Starlette:
        registry = CollectorRegistry()
        for name in ("waiting", "running"):
            Gauge(f"vllm:num_requests_{name}", name, registry=registry).set(2)
        Counter("vllm:generation_tokens", "tokens", registry=registry)
        for name in ("time_to_first_token", "inter_token_latency"):
            Histogram(f"vllm:{name}_seconds", name, registry=registry)

        async def anything(request: Request) -> Response:
            body = await request.body()
            self.asked.append(
                {
                    "method": request.method,
                    "path": request.url.path,
                    "query": request.url.query,
                    "body": body,
                    "headers": request.headers,
                }
            )
            return Response(body, 418, {"x-reply": "yes", "content-type": "application/x-some"})

        async def stream(request: Request) -> Response:
            encoding = {"content-encoding": "gzip"} if "gzip" in request.url.query else {}
            return StreamingResponse(self._parts(), headers=encoding, media_type="text/event-stream")

        async def metrics(_request: Request) -> Response:
            self.pages += 1
            return Response(generate_latest(registry), media_type="text/plain")

        return Starlette(
            routes=[
                Route("/metrics", metrics),
                Route("/stream", stream, methods=["POST"]),
                Route("/{path:path}", anything, methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    async def _parts(self) -> AsyncIterator[bytes]:
        import asyncio

        done = False
        try:
            for number in range(3):
                while not self.release.acquire(blocking=False):
                    await asyncio.sleep(0.005)  # until the test lets the next part go
                yield b'data: {"n": %d}\n\n' % number
            yield b"data: [DONE]\n\n"
            done = True
        finally:
            self.whole, self.left = self.whole + done, self.left + (not done)


@contextlib.contextmanager
def served(upstream: Upstream) -> Iterator[Upstream]:
    with listening_socket("127.0.0.1", 0) as listening:
        upstream.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = uvicorn.Server(
            uvicorn.Config(upstream.app(), log_level="error", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            wait_for("the service to start", lambda: server.started)
            yield upstream
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)


@contextlib.contextmanager
def proxied(service_url: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    argv = [sys.executable, "-m", "scavenger", "guest-proxy", "--service", service_url]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"serves (http://127\.0\.0\.1:[0-9]+);", line)
            assert found, line
            yield found[1], process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Upstream, str]]:
    with served(Upstream()) as upstream, proxied(upstream.url + "/") as (url, _process):
        yield upstream, url


def test_requests_and_replies_pass_as_they_are(both: tuple[Upstream, str]) -> None:
    upstream, url = both
    body = os.urandom(3_000_000)
    with httpx2.Client(trust_env=False, timeout=DEADLINE_S) as http:
        reply = http.put(
            f"{url}/v1/a%2Fb?x=1&y=%20",
            content=body,
            headers={"Authorization": "Bearer k", "Connection": "close, X-Mine", "X-Mine": "1"},
        )
        assert (reply.status_code, reply.headers["x-reply"], reply.content) == (418, "yes", body)
        assert "connection" not in reply.headers or reply.headers["connection"] == "close"
        asked = upstream.asked[-1]
        assert (asked["method"], asked["path"], asked["query"], asked["body"]) == (
            "PUT",
            "/v1/a/b",
            "x=1&y=%20",
            body,
        )
        assert asked["headers"]["authorization"] == "Bearer k"
        assert asked["headers"]["content-length"] == str(len(body))
        assert asked["headers"]["host"] == url.removeprefix("http://")
        assert "x-mine" not in asked["headers"]
        sent = (part for part in (b"in ", b"parts"))  # without a length
        assert http.post(f"{url}/chunked", content=sent).content == b"in parts"
        assert http.get(f"{url}/").status_code == 418
        assert upstream.asked[-1]["body"] == b""
        assert "transfer-encoding" not in upstream.asked[-1]["headers"]


def test_a_stream_passes_part_by_part_and_is_counted(both: tuple[Upstream, str]) -> None:
    upstream, url = both
    before = fetch(url + PROXY_METRICS, 10.0)
    with (
        httpx2.Client(trust_env=False, timeout=DEADLINE_S) as http,
        http.stream("POST", f"{url}/stream") as reply,
    ):
        wait_for("its age to be told", lambda: fetch(url + PROXY_METRICS, 10.0).oldest_s > 0.05)
        lines = (line for line in reply.iter_lines() if line)
        for number in range(3):
            upstream.release.release()
            assert next(lines) == f'data: {{"n": {number}}}', "it came before the next one was made"
        assert list(lines) == ["data: [DONE]"]
    after = fetch(metrics_url(url + PROXY_METRICS), 10.0)
    assert after.server == "scavenger guest-proxy"
    assert (after.waiting, after.running, after.oldest_s) == (2, 2, 0.0)
    assert after.ttft.total - before.ttft.total == 1
    assert after.tpot.total - before.tpot.total == 2
    first = after.ttft.since(before.ttft).quantile(1.0)
    assert first is not None
    assert first > 0.05


def test_a_caller_that_leaves_ends_its_request_at_the_service(both: tuple[Upstream, str]) -> None:
    upstream, url = both
    left = upstream.left
    with httpx2.Client(trust_env=False, timeout=DEADLINE_S) as http, http.stream("POST", f"{url}/stream"):
        pass
    wait_for("the service to see it", lambda: upstream.left == left + 1)
    assert fetch(url + PROXY_METRICS, 10.0).oldest_s == 0.0


def test_a_caller_that_is_slow_to_ask_does_not_make_the_service_slow(both: tuple[Upstream, str]) -> None:
    upstream, url = both
    before = fetch(url + PROXY_METRICS, 10.0)

    def body() -> Iterator[bytes]:
        yield b"a "
        until = time.monotonic() + 1.0
        wait_for("a second", lambda: time.monotonic() > until)
        yield b"prompt"

    for _ in range(3):
        upstream.release.release()
    httpx2.post(f"{url}/stream", content=body(), trust_env=False, timeout=DEADLINE_S)
    first = fetch(url + PROXY_METRICS, 10.0).ttft.since(before.ttft).quantile(1.0)
    assert first is not None
    assert first < 0.9


def test_a_stream_that_cannot_be_read_has_no_latency_and_no_age(both: tuple[Upstream, str]) -> None:
    _upstream, url = both
    before = fetch(url + PROXY_METRICS, 10.0)
    with httpx2.stream("POST", f"{url}/stream?gzip", trust_env=False, timeout=DEADLINE_S):
        for _ in range(2):
            assert fetch(url + PROXY_METRICS, 10.0).oldest_s == 0.0
    assert fetch(url + PROXY_METRICS, 10.0).ttft.total == before.ttft.total


def test_a_flood_of_readers_is_no_flood_at_the_service(both: tuple[Upstream, str]) -> None:
    upstream, url = both
    before, began = upstream.pages, time.monotonic()

    def read() -> None:
        for _ in range(10):
            fetch(url + PROXY_METRICS, 10.0)

    readers = [threading.Thread(target=read) for _ in range(10)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = time.monotonic() - began
    assert 1 <= upstream.pages - before <= seconds / READ_AGAIN_S + 2


def test_a_service_that_is_gone_is_said_to_callers_and_to_the_guest() -> None:
    with served(Upstream()) as upstream, proxied(upstream.url) as (url, _process):
        fetch(url + PROXY_METRICS, 10.0)
        gone = upstream
    with proxied(gone.url) as (url, _process):
        reply = httpx2.get(f"{url}/v1/models", trust_env=False)
        assert reply.status_code == 502
        assert "cannot be reached" in reply.text
        with pytest.raises(ServiceGone):
            fetch(url + PROXY_METRICS, 10.0)


def test_a_service_without_metrics_is_no_service_that_is_gone() -> None:
    with served(Upstream()) as upstream, proxied(upstream.url + "/v1") as (url, _process):
        with pytest.raises(ServiceError) as caught:
            fetch(url + PROXY_METRICS, 10.0)
        assert not isinstance(caught.value, ServiceGone)


# ---------------------------------------------------------------- to the byte


@dataclass
class Raw:
    """A service of plain sockets. `replies`: by path, all that it says; one without a reply it keeps open. `heard`: whole heads, and what
    came after them; `gone`: connections that callers closed."""

    port: int
    replies: dict[str, bytes] = field(default_factory=dict)
    heard: list[bytearray] = field(default_factory=list)
    gone: int = 0

    def serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            heard = bytearray()
            while b"\r\n\r\n" not in heard:
                heard += connection.recv(65536) or b"\r\n\r\n"
            self.heard.append(heard)
            reply = self.replies.get(heard.split(b" ")[1].decode(), b"")
            connection.sendall(reply)
            while not reply or b" close" in reply:
                part = connection.recv(65536)
                if not part:
                    self.gone += 1
                    return
                heard += part


@contextlib.contextmanager
def raw_service() -> Iterator[Raw]:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listening:
        raw = Raw(listening.getsockname()[1])

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=raw.serve, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield raw
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def raw() -> Iterator[tuple[Raw, str]]:
    with raw_service() as service, proxied(f"http://127.0.0.1:{service.port}/svc") as (url, _process):
        yield service, url


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), DEADLINE_S)


def answer(url: str, request: bytes) -> bytes:
    """All that comes until the connection is closed. `request` asks for that."""
    with connected(url) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


CLOSES = b"Host: a\r\nConnection: close\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


@pytest.mark.parametrize(
    "target",
    [
        b"//evil.example/x",
        b"/@evil.example:80/",
        b"/../../x",
        b"/a/./..%2f..%2fx",
        b"/a%0d%0aHost:%20b",
        b"/a\"<>\\^`{|}[]'?b={}<>%zz",
        b"//scavenger/metrics",
        b"/scavenger/metrics/",
    ],
)
def test_a_target_reaches_the_service_to_the_letter_and_no_other_host(
    raw: tuple[Raw, str], target: bytes
) -> None:
    service, url = raw
    service.replies["/svc" + target.decode()] = OK
    assert answer(url, b"TRACE " + target + b" HTTP/1.1\r\n" + CLOSES + b"\r\n").endswith(b"ok")
    assert service.heard[-1].startswith(b"TRACE /svc" + target + b" HTTP/1.1\r\nhost: a\r\n")


@pytest.mark.parametrize(
    "line", [b"GET http://evil.example/x", b"GET evil.example", b"CONNECT evil.example:443", b"OPTIONS *"]
)
def test_a_target_that_is_no_path_is_refused(raw: tuple[Raw, str], line: bytes) -> None:
    service, url = raw
    heard = len(service.heard)
    assert answer(url, line + b" HTTP/1.1\r\n" + CLOSES + b"\r\n").startswith(b"HTTP/1.1 400 ")
    assert len(service.heard) == heard


def test_what_parts_messages_is_said_once_in_both_directions(raw: tuple[Raw, str]) -> None:
    service, url = raw
    service.replies["/svc/both"] = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    )
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"
    reply = answer(url, b"POST /both HTTP/1.1\r\n" + CLOSES + both)
    assert b"content-length" not in reply.lower()
    assert reply.endswith(b"2\r\nok\r\n0\r\n\r\n")
    wait_for("the body", lambda: service.heard[-1].endswith(b"5\r\nabcde\r\n0\r\n\r\n"))
    assert b"content-length" not in service.heard[-1].lower()
    heard = len(service.heard)
    for of_two in (
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Host: b\r\n",
    ):
        assert answer(url, b"POST /x HTTP/1.1\r\n" + CLOSES + of_two + b"\r\nabcde").startswith(
            b"HTTP/1.1 400 "
        )
    assert len(service.heard) == heard


def test_headers_without_end_are_not_kept(raw: tuple[Raw, str]) -> None:
    request = b"GET /x HTTP/1.1\r\nX: " + b"a" * 50_000_000
    with connected(raw[1]) as connection, pytest.raises(OSError, match=r"reset|pipe"):
        connection.sendall(request)


def test_a_caller_without_a_host_and_one_that_asks_for_an_upgrade_are_served(raw: tuple[Raw, str]) -> None:
    service, url = raw
    service.replies["/svc/old"] = service.replies["/svc/h2c"] = OK
    assert answer(url, b"GET /old HTTP/1.0\r\n\r\n").endswith(b"ok")
    assert f"host: 127.0.0.1:{service.port}".encode() in service.heard[-1]
    upgrade = (
        b"Host: a\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n"
    )
    assert answer(url, b"POST /h2c HTTP/1.1\r\n" + upgrade + b"Content-Length: 5\r\n\r\nabcde").endswith(
        b"ok"
    )
    wait_for("the body", lambda: service.heard[-1].endswith(b"\r\n\r\nabcde"))


def test_a_reply_without_a_body_leaves_its_callers_connection_open(raw: tuple[Raw, str]) -> None:
    service, url = raw
    service.replies["/svc/same"] = (
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\nConnection: close\r\n\r\n"
    )
    service.replies["/svc/none"] = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"
    service.replies["/svc/head"] = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n"
    service.replies["/svc/ok"] = OK
    lines = (b"GET /same", b"GET /none", b"HEAD /head")
    asked = b"".join(line + b" HTTP/1.1\r\nHost: a\r\n\r\n" for line in lines)
    reply = answer(url, asked + b"GET /ok HTTP/1.1\r\n" + CLOSES + b"\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", reply) == [b"304", b"204", b"200", b"200"]
    assert reply.endswith(b"\r\n\r\nok")


@pytest.mark.parametrize(
    "whole", [b"Content-Length: 9\r\n\r\nabcde", b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"]
)
def test_a_reply_that_breaks_off_is_no_whole_one_and_one_line_is_logged(whole: bytes) -> None:
    with raw_service() as service:
        service.replies["/x"] = b"HTTP/1.1 200 OK\r\n" + whole
        argv = [sys.executable, "-m", "scavenger", "guest-proxy"]
        argv += ["--service", f"http://127.0.0.1:{service.port}"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            found = re.search(r"serves (http://127\.0\.0\.1:[0-9]+);", process.stdout.readline())
            assert found
            with pytest.raises(httpx2.RemoteProtocolError):
                httpx2.get(f"{found[1]}/x", headers={"Authorization": "Bearer k"}, trust_env=False)
            process.terminate()
            logged = process.stdout.read()
    assert len(logged.splitlines()) == 1, logged


def test_a_caller_that_leaves_before_there_is_a_reply_ends_its_request_at_the_service(
    raw: tuple[Raw, str],
) -> None:
    service, url = raw
    for request in (
        b"GET /never HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /never HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi",
        b"POST /never HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nh",
    ):
        heard, gone = len(service.heard), service.gone
        with connected(url) as connection:
            connection.sendall(request)
            wait_for("the service to hear it", lambda heard=heard: len(service.heard) > heard)  # type: ignore[misc]  # infers no type of a default
        wait_for("the service to see that nobody waits", lambda gone=gone: service.gone > gone)  # type: ignore[misc]  # infers no type of a default


def test_it_may_have_two_connections_for_each_of_many_requests() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 1024:
        pytest.skip("few open files are allowed")
    with raw_service() as service:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))  # as a login shell's is too few
        try:
            with (
                proxied(f"http://127.0.0.1:{service.port}") as (url, _process),
                contextlib.ExitStack() as all_,
            ):
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for _ in range(60):
                    connection = all_.enter_context(connected(url))
                    connection.sendall(b"GET /never HTTP/1.1\r\nHost: a\r\n\r\n")
                wait_for("all to reach the service", lambda: len(service.heard) == 60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_it_ends_once_replies_under_way_are_whole() -> None:
    with (
        served(Upstream()) as upstream,
        proxied(upstream.url) as (url, process),
        httpx2.Client(trust_env=False, timeout=DEADLINE_S) as http,
        http.stream("POST", f"{url}/stream") as reply,
    ):
        process.send_signal(signal.SIGTERM)
        port = int(url.rpartition(":")[2])
        wait_for("it to take no other request", lambda: not listens(port))
        for _ in range(3):
            upstream.release.release()
        assert [line for line in reply.iter_lines() if line][-1] == "data: [DONE]"
        process.wait(DEADLINE_S)
    assert upstream.whole == 1


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("listen", ["8001", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    argv = [
        sys.executable,
        "-m",
        "scavenger",
        "guest-proxy",
        "--service",
        "http://127.0.0.1:1",
        "--listen",
        listen,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, cwd=Path.cwd())
    assert done.returncode != 0
    assert "is no address" in done.stderr
