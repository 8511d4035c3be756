"""What Prometheus sees: the names that the dashboard, the alerts and the manual use, and the figures of a daemon that worked."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import parser

from scavenger.errors import ConfigError
from scavenger.ledger import records as rec
from scavenger.observe import metrics
from scavenger.observe.exporter import Exporter
from scavenger.observe.metrics import METRICS, Reading, RunReading, StatusMetrics
from scavenger.observe.tally import Tally, TallyingWriter

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"\b(?:scavenger|process)_[a-z_]+\b")
#: From prometheus_client's own collector.
PROCESS = {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_start_time_seconds",
}
EXPORTED = {metric.exported for metric in METRICS}


def names_in_dashboard() -> set[str]:
    board = json.loads((ROOT / "docs/grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in board["templating"]["list"]]
    return {name for text in expressions for name in NAME.findall(text)}


def alerts() -> str:
    """The alert rules in docs/admin.md: its one block of YAML."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/admin.md").read_text(), re.M | re.S)
    return str(block)


def test_every_metric_of_the_dashboard_exists_and_every_metric_has_a_place_in_it() -> None:
    assert names_in_dashboard() - EXPORTED - PROCESS == set()
    assert EXPORTED - names_in_dashboard() == set()


def test_every_metric_of_an_alert_exists_and_the_alerts_that_an_admin_needs_are_there() -> None:
    named = set(NAME.findall(alerts()))
    assert named
    assert named - EXPORTED - PROCESS == set()
    told = re.findall(r"alert: (\w+)", alerts())
    assert {"RunStalled", "LedgerLags", "NothingHarvested", "NodesQuarantined", "DaemonGone"} <= set(told)


def test_the_manual_s_table_is_every_metric_with_its_labels() -> None:
    rows = re.findall(
        r"^\| `(scavenger_\w+)(?:\{(\w+(?:, \w+)*)\})?` \|", (ROOT / "docs/admin.md").read_text(), re.M
    )
    assert {name: tuple(filter(None, labels.split(", "))) for name, labels in rows} == {
        one.exported: one.labels for one in METRICS
    }


def test_labels_of_the_dashboard_s_queries_exist() -> None:
    """`sum by (state) (scavenger_x...)` and `{{state}}` name labels of their metrics."""
    by_name = {metric.exported: set(metric.labels) | {"instance", "job"} for metric in METRICS}
    for panel in json.loads((ROOT / "docs/grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            used = {
                label for name in NAME.findall(target["expr"]) for label in by_name.get(name, {"instance"})
            }
            asked = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            asked |= {
                word.strip()
                for group in re.findall(r"by \(([^)]*)\)", target["expr"])
                for word in group.split(",")
            }
            asked |= set(re.findall(r"[{,](\w+)=", target["expr"]))
            assert asked <= used, (panel["title"], asked - used)


def worked() -> Tally:
    """A daemon's life in records: two engines, one of them preempted, one step."""
    tally = Tally()
    tokens = b"\0" * 40
    run = rec.RunCreated(1, "ada", "KEY", 0, "{}", "{}", "", 1.0)

    def joined(worker_id: int, kind: str) -> rec.WorkerJoined:
        return rec.WorkerJoined(worker_id, 1, kind, "", "s", 0, 7, "n1", 1, "reference", 2.0)

    def chunk(worker_id: int) -> rec.ChunkAccepted:
        return rec.ChunkAccepted(1, 1, 0, tokens, tokens, tokens, 1, worker_id, 3.0)

    tally.add([run, joined(1, "reserved"), joined(2, "harvested"), chunk(1), chunk(2), chunk(2)])
    tally.add(
        [
            rec.WorkerLeft(2, "preempted", True, 3, 15, 2, 4.0),
            rec.AllocationEnded("scv-1", 0, "preempted", 4.0),
        ]
    )
    tally.add(
        [rec.StepCommitted(1, 5, "train", 1, 1, '{"seconds": 10.0, "seconds_wait": 4.0, "loss": 1}', 5.0)]
    )
    tally.add([rec.StepCommitted(1, 6, "train", 1, 2, '{"seconds": 12.0, "seconds_wait": 1.0}', 9.0)])
    tally.add([rec.StepCommitted(1, 6, "eval", 1, 2, "{}", 9.0), rec.ClusterPolled(3, 2, 7, 4, 1, 9, 8.0)])
    tally.add([rec.ClusterPolled(5, 1, 0, 0, 0, 2, 9.0, cluster="b")])
    tally.add(
        [rec.Event("garbage", 0, "k", "r", "{}", 1.0), rec.Decision("harvest", "submit", "s", "r", "{}", 1.0)]
    )
    return tally


def reading(tally: Tally) -> Reading:
    run = RunReading("ada", {("harvested", "ready"): 2}, {"queued": 3, "leased": 4}, 6, 2, 6, 8.5, 9.5)
    return metrics.read(
        StatusMetrics(
            10.0,
            "0.1",
            3,
            1.0,
            True,
            0.5,
            6,
            700,
            800,
            1,
            900,
            1000,
            tally,
            (run,),
            {"": 2, "b": 1},
            {"": {"squeue": 11}},
        )
    )


def scraped(exporter: Exporter) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"http://{exporter.address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = parser.text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_a_scrape_has_what_the_daemon_did() -> None:
    exporter = Exporter("127.0.0.1:0")
    try:
        exporter.reading = reading(worked())
        found = scraped(exporter)
    finally:
        exporter.close()

    def value(name: str, **labels: str) -> float:
        """Labels that are empty are none."""
        return next(
            number
            for (called, has), number in found.items()
            if called == "scavenger_" + name and {k: v for k, v in has if v} == labels
        )

    assert (
        value("tokens_total", run="ada", source="reserved"),
        value("tokens_total", run="ada", source="harvested"),
    ) == (10, 20)
    assert (value("salvaged_tokens_total", run="ada"), value("regenerated_tokens_total", run="ada")) == (
        15,
        2,
    )
    assert (value("preemptions_total"), value("engines_lost_total", run="ada", notice="yes")) == (1, 1)
    assert (
        value("gpus", state="idle"),
        value("gpus", state="harvested"),
        value("other_users_pending_jobs"),
    ) == (3, 2, 9)
    assert (
        value("gpus", state="idle", cluster="b"),
        value("other_users_pending_jobs", cluster="b"),
        value("observed_timestamp_seconds", cluster="b"),
        value("quarantined_nodes", cluster="b"),
    ) == (5, 2, 9, 1)
    assert (value("steps_total", run="ada"), value("step_seconds", run="ada", part="step")) == (2, 12)
    assert (
        value("step_seconds", run="ada", part="wait"),
        value("step_part_seconds_total", run="ada", part="wait"),
    ) == (1, 5)
    assert value("run_progress_timestamp_seconds", run="ada") == 9, "a committed step is progress too"
    assert (
        value("slurm_rpcs_total", kind="squeue"),
        value("quarantined_nodes"),
        value("weights_version", run="ada"),
    ) == (11, 2, 2)
    assert (value("ledger_lag_seconds"), value("ledger_wal_bytes"), value("ledger_ok")) == (0.5, 800, 1)
    assert (value("events_total", kind="garbage"), value("decisions_total", action="submit")) == (1, 1)
    assert {name for name, _ in found if name.startswith("scavenger_")} <= EXPORTED


def test_every_metric_can_have_a_value() -> None:
    """A name in the table that nothing ever fills would be a promise that nobody keeps."""
    tally = worked()
    tally.add([rec.JobSubmitted("scv-1", 7, 1.0), rec.JobEnded("scv-1", "COMPLETED", "", 2.0)])
    tally.add([rec.SampleEnded(1, "consumed", "", 5, 1, 1.0, 0.0, 5.0)])
    assert [name for name, values in reading(tally).values.items() if not values] == []


def test_a_port_that_is_taken_is_refused_with_a_remedy() -> None:
    first = Exporter("127.0.0.1:0")
    try:
        with pytest.raises(ConfigError, match=r"prometheus\.listen"):
            Exporter(first.address)
    finally:
        first.close()


def test_what_the_writer_refuses_is_not_counted() -> None:
    class Refuses:
        backlog_bytes = 5

        def submit(self, ticket: int, records: object) -> None:
            raise ConfigError("closed")

        def go(self) -> None:
            """Nothing waits."""

    tally = Tally()
    counted = TallyingWriter(Refuses(), tally, lambda: 0.0)
    with pytest.raises(ConfigError):
        counted.submit(1, [rec.Event("x", 0, "", "", "{}", 1.0)])
    assert not tally.events
    assert counted.backlog_bytes == 5


def test_the_ledger_s_lag_is_the_age_of_the_oldest_record_that_is_not_durable() -> None:
    class Takes:
        backlog_bytes = 0

        def submit(self, ticket: int, records: object) -> None:
            """Taken."""

        def go(self) -> None:
            """Nothing waits."""

    now = 0.0
    counted = TallyingWriter(Takes(), Tally(), lambda: now)
    event = rec.Event("x", 0, "", "", "{}", 1.0)
    for ticket, (at, many) in enumerate(((100.0, 3), (103.0, 2), (108.0, 1))):
        now = at
        counted.submit(ticket, [event] * many)
    now = 110.0
    assert counted.lag_s(6) == 10
    assert counted.lag_s(4) == 10, "one of a submission's records is as old as all of them"
    assert counted.lag_s(3) == 7
    assert counted.lag_s(1) == 2
    assert counted.lag_s(0) == 0
    now = 500.0
    counted.submit(9, [event])
    assert counted.lag_s(1) == 0, "hours of silence before it are no lag"
