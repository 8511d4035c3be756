"""Serves the last reading to Prometheus, on a thread of its own. Owns the HTTP server and the format; reads nothing of the daemon itself.

The event loop replaces the reading every `READ_INTERVAL_S`; a scrape formats the one that is there. So a
scraper that hangs or asks all the time
costs the router nothing. Nor does one that connects and says nothing: few are served at a time, and none may pause for long, so that
a client that reaches the port cannot take the daemon's descriptors.

Boundary: an HTTP server on a thread of its own.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from socketserver import ThreadingTCPServer
from threading import BoundedSemaphore, Thread
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scavenger.asyncio_helpers import within
from scavenger.errors import ConfigError
from scavenger.host import listening
from scavenger.observe.metrics import METRICS, PREFIX, Reading

log = structlog.get_logger()

READ_INTERVAL_S = 5.0
#: A scraper that neither sends nor takes anything for so long is let go.
IDLE_S = 5.0
#: Connections at a time; one more is closed at once.
MOST = 16


class _Scrape(MetricsHandler):
    timeout = IDLE_S


class _Server(ThreadingTCPServer):
    """A thread a connection, of which there are at most `MOST`."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MOST

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self._free = BoundedSemaphore(MOST)
        self.address_family, *_, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        super().__init__((str(where[0]), port), _Scrape.factory(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was to be had: its place is free again, whatever the reason
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that goes away is its own affair; anything else is said."""
        if not isinstance(sys.exception(), OSError):
            log.warning("a scrape failed", client=str(client_address), exc_info=True)


class Exporter(Collector):
    """`address`: host:port, where port 0 lets the system choose; `self.address` says which it chose."""

    def __init__(self, address: str) -> None:
        self.reading = Reading({})
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server(host, int(port), self.registry)
        except OverflowError as error:
            raise ConfigError(
                f"prometheus.listen = {address!r}: no such port",
                "ports are 0 (the system gives one) to 65535",
            ) from error
        except OSError as error:
            raise listening.refused(listening.METRICS, host, int(port), error) from error
        self._thread = Thread(target=self._server.serve_forever, daemon=True, name="metrics")
        self._thread.start()
        self.address = f"{host}:{self._server.server_address[1]}"
        log.info("metrics", url=f"http://{self.address}/metrics")

    def collect(self) -> Iterator[Metric]:
        """Every metric, also those without a value now: a dashboard's query then finds the name."""
        reading = self.reading
        kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for metric in METRICS:
            family = kinds[metric.kind](PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in reading.values.get(metric.name, {}).items():
                family.add_metric(labels, value)
            yield family

    async def run(
        self, read: Callable[[], Reading], stop: asyncio.Event, interval_s: float = READ_INTERVAL_S
    ) -> None:
        while not stop.is_set():
            self.reading = read()
            await within(stop, interval_s)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
