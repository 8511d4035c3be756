"""Connections that send nothing, or a byte at a time, or read nothing, end by themselves and keep no viewer out."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

import httpx2

from scavenger.web import connections
from tests.web.servers import serving
from tests.web.sites import ledger

TOKEN = "t" * 32
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with serving(ledger(tmp_path_factory.mktemp("site")), TOKEN) as port:
        yield port


def opened(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def ended(one: socket.socket) -> bool:
    """Whether the server closed it, and sent nothing."""
    try:
        return bool(select.select([one], [], [], 0)[0]) and one.recv(1) == b""
    except ConnectionResetError:
        return True


def ends_while(one: socket.socket, begin: bytes, more: bytes) -> None:
    """It is sent `begin` and then `more` again and again until the server closes it."""
    one.sendall(begin)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            one.sendall(more)
            if select.select([one], [], [], 0.05)[0] and one.recv(65_536) == b"":
                return
        except (ConnectionResetError, BrokenPipeError):
            return
    raise AssertionError("the connection is still open")


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", b"x"),  # a head without an end
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b""),  # answered by 401, and nothing follows
        # A body of 100 GB after the reply.
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000000\r\n\r\n", b"x" * 1000),
    ],
    ids=["silent", "a byte at a time", "idle", "an endless body"],
)
def test_a_connection_without_a_whole_request_ends_in_time(
    port: int, monkeypatch: pytest.MonkeyPatch, begin: bytes, more: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    with opened(port) as one:
        ends_while(one, begin, more)


def test_a_request_may_take_longer_than_its_head(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with httpx2.stream("GET", f"http://127.0.0.1:{port}/live", headers=BEARER, timeout=30) as news:
        lines = news.iter_lines()
        assert next(lines) == "event: now"
        assert "event: changed" in lines  # the poller's first word comes in its own time
        time.sleep(0.6)  # what is tested is that time passes
        assert not news.is_closed


def test_of_those_that_wait_the_oldest_give_way_and_a_viewer_gets_in(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_WAITING", 40)
    with ExitStack() as stack:
        held = [stack.enter_context(opened(port)) for _ in range(120)]
        for one in held[::2]:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                one.sendall(b"GET / HT")
        assert httpx2.get(f"http://127.0.0.1:{port}/", headers=BEARER, timeout=60).status_code == 200
        gone = [ended(one) for one in held]
        assert sum(gone) in (80, 81)  # the viewer's own made one more go, or not yet
        assert all(gone[:40]), "the oldest first; asyncio accepts many at once in an order of its own"


def test_a_viewer_that_reads_nothing_is_left(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.5)
    monkeypatch.setattr(connections, "HEAD_S", 60.0)
    ask = f"GET /runs/1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(30)
        one.connect(("127.0.0.1", port))
        ends = select.poll()
        ends.register(one, select.POLLHUP | select.POLLERR | select.POLLRDHUP)
        until = time.monotonic() + 60
        while time.monotonic() < until and not ends.poll(20):
            with contextlib.suppress(OSError):
                one.sendall(ask)
        assert ends.poll(0), "the connection is still open"


def test_one_that_leaves_a_small_rest_unread_is_left_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token: what asyncio holds of the replies is less than it speaks of, and a close waits for it."""
    monkeypatch.setattr(connections, "STALLED_S", 0.5)
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    held: list[connections.Connection] = []
    made = connections.Connection.connection_made

    def small(self: connections.Connection, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)
        held.append(self)

    monkeypatch.setattr(connections.Connection, "connection_made", small)
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.connect(("127.0.0.1", port))
        one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 60)
        until = time.monotonic() + 30
        while time.monotonic() < until and not (held and held[0].transport.get_write_buffer_size()):
            time.sleep(0.02)  # until the server has more to send than fits
        assert held[0].transport.get_write_buffer_size(), "nothing is unread: the test proves nothing"
        while time.monotonic() < until and held[0].transport.get_write_buffer_size():
            time.sleep(0.02)  # until it is given up
        assert not held[0].transport.get_write_buffer_size(), "it is held for ever"


def test_what_is_no_request_fills_no_log(port: int, caplog: pytest.LogCaptureFixture) -> None:
    for said in (
        b"\0\1\2 nothing\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ):
        with opened(port) as one:
            one.sendall(said)
            assert one.recv(64).startswith(b"HTTP/1.1 40")
    assert logging.getLogger("uvicorn.error").getEffectiveLevel() >= logging.ERROR
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
