"""A stand-in for an inference service: a real HTTP server with vLLM's metrics in Prometheus's own text, of requests that nobody sends.

What is mocked is the model behind it and its load. `busy` says what each second of it looks like.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


class MockService:
    """Latencies in seconds of the requests that it pretends to serve, twenty times a second, and how many wait."""

    def __init__(self, server: WSGIServer, registry: CollectorRegistry) -> None:
        self.ttft, self.tpot = 0.04, 0.01
        self._server = server
        labels = {"engine": "0", "model_name": "m"}
        self._waiting, self._running = (
            Gauge(f"vllm:num_requests_{name}", name, labels, registry=registry).labels(**labels)
            for name in ("waiting", "running")
        )
        self._ttft, self._tpot = (
            Histogram(f"vllm:{name}_seconds", name, labels, registry=registry, buckets=BOUNDS).labels(
                **labels
            )
            for name in ("time_to_first_token", "inter_token_latency")
        )
        self._tokens = Counter("vllm:generation_tokens", "tokens", labels, registry=registry).labels(**labels)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def wait(self, requests: int) -> None:
        self._waiting.set(requests)

    def _serve(self) -> None:
        while not self._over.wait(0.05):
            self._running.set(2)
            self._ttft.observe(self.ttft)
            self._tpot.observe(self.tpot)
            self._tokens.inc()

    def end(self) -> None:
        """Nothing listens any more."""
        self._over.set()
        self._thread.join()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def service() -> Iterator[MockService]:
    registry = CollectorRegistry()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    found = MockService(server, registry)
    try:
        yield found
    finally:
        found.end()
        thread.join()
