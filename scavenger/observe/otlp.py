"""Sends spans to a collector by OTLP over HTTP. Knows nothing of the ledger.

Boundary: opentelemetry, the extra `otel`, is imported here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from scavenger import __version__
from scavenger.errors import ScavengerError
from scavenger.observe.traces import Span

#: Spans in one request.
BATCH = 512


class Collector:
    """Where spans go. `endpoint`: the collector's, as `http://127.0.0.1:4318`; "": of `OTEL_EXPORTER_OTLP_ENDPOINT`, else that port here.

    Headers (a token) and certificates come from the environment variables that OpenTelemetry names, never from arguments.
    """

    def __init__(self, endpoint: str = "") -> None:
        whole = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        self._exporter = OTLPSpanExporter(endpoint=whole)
        self._resource = Resource.create({"service.name": "scavenger", "service.version": __version__})

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *exc: object) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def send(self, spans: Iterable[Span]) -> int:
        """How many were sent. Raises `ScavengerError` where the collector does not take them; a repeat has the same ids."""
        sent, left = 0, iter(spans)
        while batch := list(islice(left, BATCH)):
            if self._exporter.export(list(self._readable(batch))) is not SpanExportResult.SUCCESS:
                raise ScavengerError(
                    f"the collector did not take {len(batch)} spans (after {sent})",
                    "does it listen for OTLP over HTTP there? Repeat the command: spans have the same ids again",
                )
            sent += len(batch)
        return sent

    def _readable(self, spans: Sequence[Span]) -> Iterator[ReadableSpan]:
        for one in spans:
            yield ReadableSpan(
                one.name,
                context=_context(one.trace_id, one.span_id),
                parent=_context(one.trace_id, one.parent_id) if one.parent_id else None,
                resource=self._resource,
                attributes=one.attributes,
                kind=SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, one.failed) if one.failed else Status(StatusCode.UNSET),
                start_time=int(one.begin * 1e9),
                end_time=int(one.end * 1e9),
                instrumentation_scope=InstrumentationScope("scavenger", __version__),
            )


def _context(trace_id: bytes, span_id: bytes) -> SpanContext:
    return SpanContext(
        int.from_bytes(trace_id),
        int.from_bytes(span_id),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
