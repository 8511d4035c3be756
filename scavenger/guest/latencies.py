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
#: First tokens that the service counts and that need not come through here: so many, and this part of them, over so many pages. The guest
#: asks for a page at each of its readings.
MISSED, MISSED_SHARE, PAGES = 3, 0.1, 600
#: Parts of a stream of server-sent events that have no token.
_NO_TOKEN = (b"data: [DONE]", b"data:[DONE]")


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
    """How many server-sent events with data begin in a part of a stream; `[DONE]` is none. Each is counted as one token: servers send an
    event for each step of a sample."""
    lines = [line for line in part.split(b"\n") if line.startswith(b"data:")]
    return sum(not line.startswith(_NO_TOKEN) for line in lines)


class Latencies:
    """`begun`, `came`, `ended`: the life of a streamed reply. Its number is the caller's."""

    def __init__(self) -> None:
        self._ttft, self._tpot = _Counted(), _Counted()
        self._begun: dict[int, float] = {}  # without a first token: when they were asked for
        self._last: dict[int, float] = {}  # with one: when the newest part came
        #: First tokens that the service counted and that were seen here, at each page of the last ones.
        self._pages: deque[tuple[float, int]] = deque(maxlen=PAGES)

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
        here, the latencies are the service's own: others may ask it directly, and of a reply that is not streamed nobody sees its first
        token.
        """
        self._pages.append((service.ttft.total, self._ttft.total))
        (first, seen_first), (last, seen_last) = self._pages[0], self._pages[-1]
        counted = last - first  # below 0 where the service was started again
        all_seen = counted - (seen_last - seen_first) <= MISSED + MISSED_SHARE * counted
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
