"""Serves the last reading to Prometheus, on a thread of its own. Owns the HTTP server and the format; reads nothing of the daemon itself.

The event loop replaces the reading every `LOOK_S`; a scrape formats the one that is there. So a scraper that hangs or asks all the time
costs the router nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scavenger.errors import ConfigError
from scavenger.observe.metrics import METRICS, PREFIX, Reading

log = structlog.get_logger()

LOOK_S = 5.0


class Exporter(Collector):
    """`address`: host:port, where port 0 lets the system choose; `self.address` says which it chose."""

    def __init__(self, address: str) -> None:
        self.reading = Reading({})
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        host, _, port = address.rpartition(":")
        try:
            served: tuple[WSGIServer, Thread] = start_http_server(int(port), host, self.registry)
        except OSError as error:
            remedy = "free the port, or let the system choose one: prometheus.listen = \"127.0.0.1:0\""
            raise ConfigError(f"prometheus.listen = {address!r}: {error.strerror or error}", remedy) from error
        self._server, self._thread = served
        self.address = f"{host}:{self._server.server_port}"
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

    async def run(self, look: Callable[[], Reading], stop: asyncio.Event, look_s: float = LOOK_S) -> None:
        while not stop.is_set():
            self.reading = look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), look_s)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
