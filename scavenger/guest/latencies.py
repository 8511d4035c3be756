"""Latencies of a service's streamed replies, counted as they pass through `proxy.py`, and the page of metrics that says them. Pure.

The server's own histograms know a latency to its bucket, of a factor of 2 and more. Here a bucket is 5 % wide.

Boundary: arithmetic, apart from the HTTP of `proxy.py`: knows no clock, the caller says when something came.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from scavenger.guest.metrics import PROXY, Histogram, ServiceReading

#: Upper bounds in seconds, each 5 % above the one before: from 1 ms to some 1,000 s.
BOUNDS = (*(1e-3 * 1.05**n for n in range(284)), math.inf)
#: First tokens that the service counts and that need not come through here: so many, and this part of them, over so many seconds.
MISSED, MISSED_SHARE, LATELY_S = 3, 0.1, 120.0
#: Between two pages that are compared: however often a page is asked for.
_APART_S = 1.0
#: Server-sent events that have no token: the last one, and those that say where a reply of /v1/responses or /v1/messages stands. The first
#: of these come before any token is made.
_NO_TOKEN = (b"data: [DONE]", b"data:[DONE]")
_STANDS = (b"response.", b"message_", b"content_block_", b"ping")


@dataclass(slots=True)
class _Counted:
    """A histogram since this process began."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    total: int = 0

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += times

    def histogram(self) -> Histogram:
        return Histogram(BOUNDS, tuple(map(float, itertools.accumulate(self.counts))))


def events(part: bytes) -> int:
    """How many server-sent events with a token begin in a part of a stream. Each is counted as one token: servers send an event for each
    step of a sample."""
    count, stands = 0, False
    for line in part.split(b"\n"):
        if line.startswith(b"event:"):
            name = line.removeprefix(b"event:").strip()
            stands = name.startswith(_STANDS) and not name.endswith(b"delta")
        elif line.startswith(b"data:"):
            count += not stands and not line.startswith(_NO_TOKEN)
            stands = False
    return count


class Latencies:
    """`begun`, `came`, `ended`: the life of a streamed reply. Its number is the caller's."""

    def __init__(self) -> None:
        self._ttft, self._tpot = _Counted(), _Counted()
        self._begun: dict[int, float] = {}  # without a first token: when they were asked for
        self._last: dict[int, float] = {}  # with one: when the newest part came
        #: When, and how many first tokens the service had counted and were seen here: pages of the last `LATELY_S`.
        self._pages: deque[tuple[float, float, int]] = deque()
        self._missed_until = -math.inf

    def begun(self, request: int, asked_at: float) -> None:
        """The service began to stream a reply; tokens come later."""
        self._begun[request] = asked_at

    def came(self, request: int, tokens: int, now: float) -> None:
        """Some tokens of a reply, together."""
        if tokens <= 0:
            return
        asked_at = self._begun.pop(request, None)
        if asked_at is not None:
            self._ttft.add(now - asked_at)
        elif request in self._last:
            self._tpot.add((now - self._last[request]) / tokens, tokens)
        self._last[request] = now

    def ended(self, request: int) -> None:
        self._begun.pop(request, None)
        self._last.pop(request, None)

    def page(self, service: ServiceReading, now: float) -> bytes:
        """What the service says of its queue, and what was seen here of its latencies, in Prometheus's text format.

        Where more of the first tokens that the service counted lately than `MISSED` and `MISSED_SHARE` did not come as streams through
        here, the latencies are the service's own, for `LATELY_S` at least: others may ask it directly, and of a reply that is not streamed
        nobody sees its first token.
        """
        all_seen = self._all_seen(service.ttft.total, now)
        oldest_s = now - min(self._begun.values(), default=now)
        return _text(
            (
                GaugeMetricFamily(PROXY.waiting, "requests that wait, by the service", service.waiting),
                GaugeMetricFamily(PROXY.running, "requests that run, by the service", service.running),
                CounterMetricFamily(PROXY.tokens, "tokens, by the service", service.tokens),
                GaugeMetricFamily(PROXY.oldest, "age of the oldest stream without a token", oldest_s),
                _family(
                    PROXY.ttft,
                    "from a request to its first token",
                    self._ttft.histogram() if all_seen else service.ttft,
                ),
                _family(
                    PROXY.tpot[0],
                    "from a token to the next",
                    self._tpot.histogram() if all_seen else service.tpot,
                ),
            )
        )

    def _all_seen(self, counted: float, now: float) -> bool:
        pages, seen = self._pages, self._ttft.total
        if pages and counted < pages[-1][1]:
            pages.clear()  # the service was started again
        if not pages or now - pages[-1][0] >= _APART_S:
            pages.append((now, counted, seen))
        while len(pages) > 1 and pages[1][0] <= now - LATELY_S:
            pages.popleft()
        _, first, seen_first = pages[0]
        lately = counted - first
        if lately - (seen - seen_first) > MISSED + MISSED_SHARE * lately:
            self._missed_until = now + LATELY_S
        return now >= self._missed_until


def _family(name: str, says: str, counted: Histogram) -> Metric:
    bounds = ("+Inf" if math.isinf(bound) else f"{bound:.6g}" for bound in counted.bounds)
    return HistogramMetricFamily(
        name, says, buckets=list(zip(bounds, counted.counts, strict=True)), sum_value=None
    )


class _Once:
    """A collector of families that are made already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _text(families: Sequence[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Once(families))
    return generate_latest(registry)
