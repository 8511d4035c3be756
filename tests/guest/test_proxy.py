"""The proxy before a service: what passes, when, and which latencies it tells.

The service is a real HTTP server (uvicorn) that streams as it is told to; what is mocked is the model behind it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
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
from scavenger.guest.latencies import MISSED, Latencies, events  # noqa: E402
from scavenger.guest.metrics import Histogram as Read  # noqa: E402
from scavenger.guest.metrics import ServiceError, ServiceReading, parse  # noqa: E402
from scavenger.guest.proxy import end_to_end  # noqa: E402
from scavenger.guest.service import PROXY_METRICS, ServiceGone, fetch, metrics_url  # noqa: E402

DEADLINE_S = 60.0
NOTHING = ServiceReading("vLLM", Read(), Read(), 0, 0, 0.0)


def wait_for(what: str, condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


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


# ---------------------------------------------------------------- with a server


@dataclass
class Upstream:
    """`release`: parts that each stream may send now. `left`: streams whose caller left. `asked`: what came."""

    url: str = ""
    release: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    whole: int = 0

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

        async def stream(_request: Request) -> Response:
            return StreamingResponse(self._parts(), media_type="text/event-stream")

        async def metrics(_request: Request) -> Response:
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
    import socket

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
