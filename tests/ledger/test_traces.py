"""`scavenger otel`: what a collector gets of a step, from both databases, over a real connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Received
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.errors import ConfigError, LedgerError, ScavengerError
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.read.reader import reading
from scavenger.observe import otlp, traces
from tests.ledger.examples import CONFIG, T0, consumed, everything, group, moved_group, prologue, written
from tests.top import sites


class _Collector(HTTPServer):
    """`spans`: as they came. `status`: what it replies."""

    spans: list[Received]
    status = 200

    def start(self) -> str:
        self.spans = []
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, _Collector)
        assert self.path == "/v1/traces"
        request = ExportTraceServiceRequest()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request.ParseFromString(body)
        if server.status == 200:
            for resource in request.resource_spans:
                named = {one.key: one.value.string_value for one in resource.resource.attributes}
                assert named["service.name"] == "scavenger"
                for scope in resource.scope_spans:
                    server.spans += scope.spans
        self.send_response(server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[_Collector]:
    with _Collector(("127.0.0.1", 0), _Handler) as server:
        yield server
        server.shutdown()


def trace(url: str, step: int = 1) -> list[traces.Span]:
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:
            run = traces.find(connection, "sorting")
            assert step in traces.committed(connection, run, 0)
            assert traces.committed(connection, run, 10_000) == []
            return traces.read(connection, run, step)
    finally:
        engine.dispose()


def test_a_step_is_a_trace_of_its_samples_and_their_leases(url: str) -> None:
    written(url, everything())
    found = trace(url)
    assert found == trace(url), "the same ids each time"
    root, *rest = found
    assert (root.name, root.parent_id, root.attributes["scavenger.run"]) == ("step 1", b"", "sorting")
    assert {one.trace_id for one in found} == {
        traces.trace_id(traces.TracedRun(1, "sorting", _timeline(url)), 1, 2)
    }
    assert len({one.span_id for one in found}) == len(found)
    samples = {one.span_id: one for one in rest if one.name == "sample"}
    assert {one.attributes["scavenger.sample_id"] for one in samples.values()} >= {11, 12}
    assert all(one.parent_id == root.span_id for one in samples.values())
    leases = [one for one in rest if one.name.startswith("lease")]
    assert len(samples) + len(leases) == len(rest)
    for one in leases:
        owner = samples[one.parent_id]
        assert one.attributes["scavenger.sample_id"] == owner.attributes["scavenger.sample_id"]
        assert root.begin <= owner.begin <= one.begin <= one.end <= owner.end + 1e-6
    moved = [one for one in leases if one.attributes["scavenger.sample_id"] == 11]
    assert [(one.name, one.attributes["scavenger.node"], one.begin - T0, one.end - T0) for one in moved] == [
        ("lease 1", "n3", 6, 8),
        ("lease 2", "n0", 9, 10),
    ]


def _timeline(url: str) -> str:
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:
            return traces.find(connection, "sorting").timeline
    finally:
        engine.dispose()


def regenerated() -> list[list[r.Record]]:
    """Attempt 1 commits step 1 and is lost; attempt 2 starts over, a minute later, and generates it again, beside an agent's turn."""
    later = T0 + 60
    return [
        [*prologue(), *moved_group(), *consumed()],
        [
            r.StepsRewound(1, 2, 0, later),
            r.AttemptGranted(1, 2, "login2", 101, 0, CONFIG, "{}", later),
            *(r.SampleReopened(one, 2, later) for one in (11, 12)),
            *(
                r.SampleEnded(one, "superseded", "attempt 2", 0, 0, None, None, later + 0.5)
                for one in (11, 12)
            ),
            msgspec.structs.replace(group(20, 21, 2, 1, 1, retry=1), prompt_index=0, at=later + 1),
            *(r.LeaseGranted(one, 1, 2, 1, 0, later + 1) for one in (21, 22)),
            msgspec.structs.replace(group(30, 31, 1, 1, 1, purpose="turn"), at=later + 2),
            r.LeaseGranted(31, 1, 2, 1, 0, later + 2),
            *consumed(20, 21, attempt=2, at=later + 11),
        ],
    ]


def test_a_step_that_was_generated_again_is_another_trace_without_what_is_gone(url: str) -> None:
    first, second = regenerated()
    written(url, [first])
    before = trace(url)
    written(url, [second])
    root, *rest = trace(url)
    assert (root.attributes["scavenger.attempt"], root.begin - T0, root.end - T0) == (2, 61, 72)
    samples = {
        one.attributes["scavenger.sample_id"]: one.attributes["scavenger.purpose"]
        for one in rest
        if one.name == "sample"
    }
    assert samples == {21: "train", 22: "train", 31: "turn"}
    assert {one.attributes["scavenger.sample_id"] for one in rest if one.name != "sample"} == {21, 22, 31}
    assert {one.attributes["scavenger.sample_id"] for one in before[1:]} == {11, 12}
    assert not {root.trace_id} & {one.trace_id for one in before}
    assert not {root.span_id} & {one.span_id for one in before}


def test_what_is_left_out_is_said(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written(url, everything())
    assert traces.CUT not in trace(url)[0].attributes
    monkeypatch.setattr(traces, "MOST_SAMPLES", 1)
    monkeypatch.setattr(traces, "MOST_METRICS", 0)
    root, *rest = trace(url)
    assert root.attributes[traces.CUT] == "samples beyond 1, metrics beyond 0"
    assert [one.name for one in rest].count("sample") == 1


def test_what_is_not_there_is_said(url: str) -> None:
    written(url, everything())
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:
            with pytest.raises(LedgerError, match="no run 'other'"):
                traces.find(connection, "other")
            with pytest.raises(LedgerError, match="step 99 of run 'sorting' is not committed"):
                traces.read(connection, traces.find(connection, "sorting"), 99)
    finally:
        engine.dispose()


def test_a_collector_gets_every_span_with_its_ids_and_times(
    tmp_path: Path, collector: _Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sites.site(tmp_path)
    address = collector.start()
    done = CliRunner().invoke(app, ["otel", "sorting", "--config", str(config), "--endpoint", address])
    assert done.exit_code == 0, done.output
    made = trace(f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite3'}")
    assert [(one.trace_id, one.span_id, one.parent_span_id, one.name) for one in collector.spans] == [
        (one.trace_id, one.span_id, one.parent_id, one.name) for one in made
    ]
    for got, one in zip(collector.spans, made, strict=True):
        assert got.start_time_unix_nano == int(one.begin * 1e9)
        assert got.end_time_unix_nano == int(one.end * 1e9)
    assert f"step 1: {len(made)} spans, trace {made[0].trace_id.hex()}\n" in done.output
    monkeypatch.setattr(traces, "MOST_SAMPLES", 1)
    done = CliRunner().invoke(app, ["otel", "sorting", "--config", str(config), "--endpoint", address])
    assert "(left out: samples beyond 1" in done.output


def test_many_spans_go_in_bounded_requests_and_a_refusal_is_said(
    collector: _Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "BATCH", 4)
    address = collector.start()
    ids = [i.to_bytes(8) for i in range(1, 11)]
    with otlp.Collector(address) as sender:
        assert sender.send(traces.Span(b"t" * 16, one, b"", "x", 1.0, 2.0, failed="why") for one in ids) == 10
        assert [one.span_id for one in collector.spans] == ids
        assert collector.spans[0].status.message == "why"
        collector.status = 400  # such a one is not tried again
        with pytest.raises(ScavengerError, match="did not take"):
            sender.send([traces.Span(b"t" * 16, b"s" * 8, b"", "x", 1.0, 2.0)])


def test_one_step_and_following_exclude_each_other(tmp_path: Path) -> None:
    config = sites.site(tmp_path)
    given = ["otel", "sorting", "--config", str(config), "--step", "1", "--follow"]
    assert isinstance(CliRunner().invoke(app, given).exception, ConfigError)
