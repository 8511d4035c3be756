"""Asks a service for its metrics, once an interval, and keeps the readings that a window needs.

Owns one HTTP request at a time, bounded in time and size, and what the differences of two readings say. Decides nothing.

Boundary: HTTP to the service.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from dataclasses import dataclass, field

from scavenger.errors import ConfigError
from scavenger.guest.metrics import MAX_PAGE_BYTES, ServiceError, ServiceReading, parse
from scavenger.policy.serving import ServiceView


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


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: object) -> None:
        return None


def fetch(url: str, timeout_s: float) -> ServiceReading:
    """One reading. No proxy and no redirect: it is a process of the same job. Raises `ServiceError`, `ServiceGone`."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(url, timeout=timeout_s) as reply:
            return parse(reply.read(MAX_PAGE_BYTES + 1))
    except urllib.error.HTTPError as error:
        raise ServiceError(f"{url} replied {error.code}", "name the server's own address") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            raise ServiceGone(f"{url}: nothing listens there", "start the service first") from error
        raise ServiceError(
            f"{url} cannot be read: {error.reason}", "name the server's own address"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ServiceError(f"{url} cannot be read: {error}", "name the server's own address") from error


@dataclass(slots=True)
class Window:
    """The readings of the last `window_s`, by when they were read, and the most samples of ours between two."""

    window_s: float
    _readings: deque[tuple[float, ServiceReading, int]] = field(default_factory=deque)

    def view(self, now: float, reading: ServiceReading, peak: int) -> ServiceView | None:
        """What is known now; None with the first reading, which has nothing to be compared with. `peak`: samples since the last one."""
        kept = self._readings
        kept.append((now, reading, peak))
        while len(kept) > 2 and kept[1][0] <= now - self.window_s:
            kept.popleft()
        if len(kept) < 2:
            return None
        first, last = kept[0][1], kept[-2][1]
        return ServiceView(
            reading.ttft.since(first.ttft).quantile(0.99),
            reading.tpot.since(first.tpot).quantile(0.99),
            reading.waiting,
            reading.running,
            max(most for _, _, most in list(kept)[1:]),
            reading.ttft.since(last.ttft).quantile(0.5),
            reading.tpot.since(last.tpot).quantile(0.5),
        )
