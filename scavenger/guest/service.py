"""Asks a service for its metrics, once an interval.

Owns one HTTP request at a time, bounded in time and size. Decides nothing.

Boundary: HTTP to the service.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.parse

from scavenger.errors import ConfigError
from scavenger.guest.metrics import MAX_PAGE_BYTES, ServiceError, ServiceReading, parse

#: The page of `proxy.py`, which passes every other path on.
PROXY_METRICS = "/scavenger/metrics"


class ServiceGone(ServiceError):
    """Nothing listens at the service's address."""


def metrics_url(service: str) -> str:
    """The address of the metrics of a service at `service`, as in "http://127.0.0.1:8000". Raises `ConfigError`."""
    parts = urllib.parse.urlsplit(service)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--service {service!r} is no address", 'name it as in "http://127.0.0.1:8000"')
    path = parts.path.rstrip("/")
    return urllib.parse.urlunsplit(
        (parts.scheme, parts.netloc, path if path.endswith("/metrics") else f"{path}/metrics", "", "")
    )


def fetch(url: str, timeout_s: float) -> ServiceReading:
    """One reading, within `timeout_s` in all, however slowly the page comes: who reads it has an engine to stop meanwhile. Looking a name
    up is not bounded by it. No proxy and no redirect: it is a process of the same job. Raises `ServiceError`, `ServiceGone`.
    """
    try:
        return parse(_page(url, timeout_s))
    except ConnectionRefusedError as error:
        raise ServiceGone(f"{url}: nothing listens there", "start the service first") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServiceError(f"{url} cannot be read: {error}", "name the server's own address") from error


def _page(url: str, timeout_s: float) -> bytes:
    parts = urllib.parse.urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    late = threading.Event()
    opened: list[socket.socket] = []

    def give_up() -> None:
        late.set()
        # A TLS handshake is under way on what the connection has; a reply that ends it has taken that away.
        for one in (*opened, connection.sock):
            if one is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(
                        one, socket.SHUT_RDWR
                    )  # not TLS's own, which the reader still uses

    timer = threading.Timer(timeout_s, give_up)
    timer.start()
    try:
        connection.connect()
        opened.append(connection.sock)
        if late.is_set():
            raise TimeoutError
        connection.request("GET", parts.path, headers={"Accept": "text/plain", "Connection": "close"})
        with connection.getresponse() as reply:
            if reply.status == http.client.GONE:
                raise ServiceGone(f"{url}: nothing listens behind this proxy", "start the service first")
            if reply.status != http.client.OK:
                raise ServiceError(f"{url} replied {reply.status}", "name the server's own address")
            page = reply.read(MAX_PAGE_BYTES + 1)
        if late.is_set():
            raise TimeoutError  # what came is a part
        return page
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(f"no whole page within {timeout_s:g} s") from error
        raise
    finally:
        timer.cancel()
        timer.join()
        connection.close()
        for one in opened:  # a reply to which the connection was left, and that never came
            one.close()
