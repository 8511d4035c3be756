"""Every metric that the daemon exports: its name, kind, labels and meaning, and its values in a `Reading`. Pure.

Owns the names: docs/grafana.json and the alerts in docs/admin.md may use these and no others (`tests/observe/test_metrics.py`). Counters
begin with the daemon. Knows neither router nor ledger: `reading` fills a `Reading` on the event loop, and the exporter only formats it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scavenger.observe.tally import Tally
from scavenger.protocol.worker.events import NOT_SPECULATED, Speculated

PREFIX = "scavenger_"


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter's `name` lacks the `_total` that Prometheus sees."""

    name: str
    kind: str  # counter | gauge
    help: str
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


#: What may become of the KV blocks of a moved sample.
KV_OUTCOMES = ("moved", "prefilled", "gone", "refused")


@dataclass(frozen=True, slots=True)
class RunReading:
    """One run now. `engines`: (kind, state) -> how many; `samples`: state -> how many; times are Unix seconds."""

    name: str
    engines: Mapping[tuple[str, str], int]
    samples: Mapping[str, int]
    wanted: int
    version: int
    step: int
    progress_at: float
    trainer_seen: float
    weights_pause_s: float = 0.0
    speculated: Speculated = NOT_SPECULATED
    siblings_sent: int = 0
    #: What became of moved samples' KV blocks -> samples.
    kv_samples: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(KV_OUTCOMES, 0))
    kv_tokens: int = 0  # whose blocks moved
    kv_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything at one moment, copied: it may be read from any thread."""

    values: Mapping[str, Mapping[tuple[str, ...], float]]


@dataclass(slots=True)
class StatusMetrics:
    """What `values` makes a reading of; on the event loop, and used at once."""

    at: float
    version: str
    generation: int
    started_at: float
    ledger_ok: bool
    ledger_lag_s: float
    backlog_records: int
    backlog_bytes: int
    wal_bytes: int
    wal_blocked: int
    payload_bytes: int
    payload_bound_bytes: int
    tally: Tally
    runs: tuple[RunReading, ...] = ()
    quarantined: Mapping[str, int] = field(default_factory=dict)  # nodes by cluster
    rpcs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by cluster and kind


METRICS = (
    Metric("build_info", "gauge", "1, with the release as its label", ("version",)),
    Metric("generation", "gauge", "The ledger's generation that this daemon is"),
    Metric("start_timestamp_seconds", "gauge", "When the daemon started"),
    Metric(
        "gpus",
        "gauge",
        "GPUs of the harvest partition at the last poll; reserved: those on other nodes",
        ("state", "cluster"),
    ),
    Metric(
        "other_users_pending_jobs",
        "gauge",
        "Pending jobs of other users that could use GPUs of the harvest partition",
        ("cluster",),
    ),
    Metric(
        "observed_timestamp_seconds", "gauge", "When Slurm was last seen whole; 0 = not yet", ("cluster",)
    ),
    Metric("engines", "gauge", "Engines by kind (harvested, reserved) and state", ("run", "kind", "state")),
    Metric("engines_wanted", "gauge", "Harvested engines that a run could use now", ("run",)),
    Metric(
        "samples_in_flight",
        "gauge",
        "Samples that are not delivered and taken yet, by state",
        ("run", "state"),
    ),
    Metric(
        "tokens", "counter", "Tokens accepted, by the kind of engine that generated them", ("run", "source")
    ),
    Metric("salvaged_tokens", "counter", "Tokens that samples of lost engines kept", ("run",)),
    Metric(
        "regenerated_tokens",
        "counter",
        "Tokens that were lost with an engine and are generated again",
        ("run",),
    ),
    Metric("engines_lost", "counter", "Engines that left, with notice or without", ("run", "notice")),
    Metric(
        "allocations_ended",
        "counter",
        "Harvested GPUs given up, by reason: preempted, cancelled, completed, failed, ...",
        ("reason",),
    ),
    Metric("preemptions", "counter", "Harvested engines that Slurm preempted"),
    Metric("jobs_submitted", "counter", "Jobs that Slurm took"),
    Metric("jobs_ended", "counter", "Jobs of ours that ended, by Slurm's state", ("state",)),
    Metric(
        "samples_ended",
        "counter",
        "Samples that ended, by how: consumed, filtered, superseded, poisoned, ...",
        ("state",),
    ),
    Metric("steps", "counter", "Optimizer steps committed", ("run",)),
    Metric("run_step", "gauge", "The last step that stands", ("run",)),
    Metric(
        "step_seconds",
        "gauge",
        "Seconds of the last step, by part: step (all), wait (stall), train, publish",
        ("run", "part"),
    ),
    Metric("step_part_seconds", "counter", "The same, summed over all steps", ("run", "part")),
    Metric(
        "run_progress_timestamp_seconds",
        "gauge",
        "When a token of the run was last accepted, or a step committed",
        ("run",),
    ),
    Metric("trainer_seen_timestamp_seconds", "gauge", "When the run's trainer was last heard", ("run",)),
    Metric("weights_version", "gauge", "The newest weight version that the run published", ("run",)),
    Metric(
        "weights_pause_seconds",
        "gauge",
        "Longest of its engines' last pauses between a version's last token and the next one's first",
        ("run",),
    ),
    Metric("drafted_tokens", "counter", "Tokens that engines drafted from siblings and verified", ("run",)),
    Metric("accepted_drafts", "counter", "Of those, the tokens that were accepted", ("run",)),
    Metric("verifications", "counter", "Passes of one sample in which a draft was verified", ("run",)),
    Metric(
        "sibling_tokens",
        "counter",
        "Siblings' tokens that were sent from engine to engine for drafts",
        ("run",),
    ),
    Metric(
        "kv_samples",
        "counter",
        "Moved samples whose KV blocks were kept, by what became of these: moved, prefilled, gone, refused",
        ("run", "outcome"),
    ),
    Metric("kv_tokens", "counter", "Tokens whose KV blocks moved and were not prefilled again", ("run",)),
    Metric("kv_bytes", "counter", "Bytes of KV blocks that moved from engine to engine", ("run",)),
    Metric(
        "quarantined_nodes",
        "gauge",
        "Nodes that get no engine now because engines died on them",
        ("cluster",),
    ),
    Metric("slurm_rpcs", "counter", "Commands or calls to Slurm, by kind", ("kind", "cluster")),
    Metric("decisions", "counter", "What the harvester decided, by action", ("action", "cluster")),
    Metric("events", "counter", "The ledger's events, by kind", ("kind",)),
    Metric("ledger_ok", "gauge", "1 while the ledger takes what is written, else 0"),
    Metric("ledger_lag_seconds", "gauge", "Age of the oldest record that is not durable yet; 0 = all are"),
    Metric("ledger_backlog_records", "gauge", "Records submitted and not durable yet"),
    Metric("ledger_backlog_bytes", "gauge", "About the memory that they take"),
    Metric("ledger_wal_bytes", "gauge", "SQLite's write-ahead log; 0 on PostgreSQL"),
    Metric(
        "ledger_wal_blocked",
        "counter",
        "Times that the log was too large and a reader prevented writing it back",
    ),
    Metric("payload_bytes", "gauge", "Tokens in flight that are kept in memory"),
    Metric("payload_bound_bytes", "gauge", "What daemon.payload_memory_mb allows"),
)

Values = dict[str, dict[tuple[str, ...], float]]


def read(metrics_read: StatusMetrics) -> Reading:
    """Every metric of `METRICS`, by name and labels; one without any value now is there, and empty."""
    values: Values = {metric.name: {} for metric in METRICS}
    for part in (_daemon, _harvest, _runs, _counters):
        for name, labels, value in part(metrics_read):
            values[name][labels] = float(value)
    return Reading(values)


Sample = tuple[str, tuple[str, ...], float]


def _daemon(f: StatusMetrics) -> Iterator[Sample]:
    yield "build_info", (f.version,), 1
    plain = {
        "generation": f.generation,
        "start_timestamp_seconds": f.started_at,
        "ledger_ok": f.ledger_ok,
        "ledger_lag_seconds": f.ledger_lag_s,
        "ledger_backlog_records": f.backlog_records,
        "ledger_backlog_bytes": f.backlog_bytes,
        "ledger_wal_bytes": f.wal_bytes,
        "ledger_wal_blocked": f.wal_blocked,
        "payload_bytes": f.payload_bytes,
        "payload_bound_bytes": f.payload_bound_bytes,
    }
    yield from ((name, (), value) for name, value in plain.items())


def _harvest(f: StatusMetrics) -> Iterator[Sample]:
    """An empty label is none: a site of one cluster sees no `cluster`."""
    for cluster, seen in sorted(f.tally.gpus.items()):
        for state in ("idle", "harvested", "other_users", "reserved", "unusable"):
            yield "gpus", (state, cluster), getattr(seen, f"gpus_{state}")
        yield "other_users_pending_jobs", (cluster,), seen.jobs_pending_other_users
    for cluster in sorted({"", *f.quarantined}):
        yield (
            "observed_timestamp_seconds",
            (cluster,),
            f.tally.gpus[cluster].at if cluster in f.tally.gpus else 0,
        )
        yield "quarantined_nodes", (cluster,), f.quarantined.get(cluster, 0)
    for cluster, kinds in sorted(f.rpcs.items()):
        yield from (("slurm_rpcs", (kind, cluster), count) for kind, count in sorted(kinds.items()))


def _runs(f: StatusMetrics) -> Iterator[Sample]:
    for run in f.runs:
        one = (run.name,)
        yield from (("engines", (run.name, *key), count) for key, count in sorted(run.engines.items()))
        yield from (
            ("samples_in_flight", (run.name, state), count) for state, count in sorted(run.samples.items())
        )
        yield "engines_wanted", one, run.wanted
        yield "weights_version", one, run.version
        yield "weights_pause_seconds", one, run.weights_pause_s
        yield "drafted_tokens", one, run.speculated.drafted
        yield "accepted_drafts", one, run.speculated.accepted
        yield "verifications", one, run.speculated.verifications
        yield "sibling_tokens", one, run.siblings_sent
        yield from (("kv_samples", (run.name, how), count) for how, count in sorted(run.kv_samples.items()))
        yield "kv_tokens", one, run.kv_tokens
        yield "kv_bytes", one, run.kv_nbytes
        yield "run_step", one, run.step
        yield (
            "run_progress_timestamp_seconds",
            one,
            max(run.progress_at, f.tally.step_committed_at.get(run.name, 0.0)),
        )
        yield "trainer_seen_timestamp_seconds", one, run.trainer_seen


def _counters(f: StatusMetrics) -> Iterator[Sample]:
    t = f.tally
    yield "preemptions", (), t.allocations_ended["preempted"]
    yield "jobs_submitted", (), t.jobs_submitted
    single = {
        "salvaged_tokens": t.salvaged,
        "regenerated_tokens": t.regenerated,
        "allocations_ended": t.allocations_ended,
        "jobs_ended": t.jobs_ended,
        "samples_ended": t.samples_ended,
        "steps": t.steps,
        "events": t.events,
    }
    for name, counter in single.items():
        yield from ((name, (label,), count) for label, count in sorted(counter.items()))
    yield from (("decisions", labels, count) for labels, count in sorted(t.decisions.items()))
    yield from (("tokens", labels, count) for labels, count in sorted(t.tokens.items()))
    yield from (("engines_lost", labels, count) for labels, count in sorted(t.engines_lost.items()))
    for name, seconds in (("step_seconds", t.last_step_seconds), ("step_part_seconds", t.step_seconds)):
        for run, parts in sorted(seconds.items()):
            yield from ((name, (run, part), value) for part, value in sorted(parts.items()))
