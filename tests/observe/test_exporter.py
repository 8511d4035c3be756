"""Whoever reaches the metrics' port can take few of the daemon's descriptors, and none for long."""

from __future__ import annotations

import contextlib
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from scavenger.observe import exporter as module
from scavenger.observe.exporter import MOST, Exporter
from tests.clusters import wait_for


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    one = Exporter("127.0.0.1:0")
    try:
        yield one
    finally:
        one.close()


def idle(exporter: Exporter, stack: contextlib.ExitStack) -> socket.socket:
    """A connection that says nothing."""
    host, _, port = exporter.address.rpartition(":")
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=20.0))


def ended(connection: socket.socket) -> bool:
    """The other side closed it. Raises `TimeoutError`."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def scraped(exporter: Exporter) -> bool:
    try:
        with urllib.request.urlopen(f"http://{exporter.address}/metrics", timeout=10) as answer:
            return b"scavenger_" in answer.read()
    except (urllib.error.URLError, ConnectionError):
        return False


def test_one_connection_too_many_is_closed_at_once_and_a_place_that_is_left_is_free(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._Scrape, "timeout", 60.0)
    with contextlib.ExitStack() as stack:
        held = [idle(exporter, stack) for _ in range(MOST)]
        assert all(ended(idle(exporter, stack)) for _ in range(3))
        assert not scraped(exporter)
        held[0].close()
        wait_for("a scrape", lambda: scraped(exporter))
        held[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            held[1].recv(1)  # it was not sent away for the others


def test_who_says_nothing_is_let_go(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._Scrape.timeout == 5.0
    monkeypatch.setattr(module._Scrape, "timeout", 0.3)
    with contextlib.ExitStack() as stack:
        assert all(ended(one) for one in [idle(exporter, stack) for _ in range(MOST)])
        wait_for("a scrape", lambda: scraped(exporter))
