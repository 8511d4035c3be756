"""A train step as an OpenTelemetry trace: the step, each sample of it, each sample's stay at an engine. Pure, but for `read`.

    step N                       from its first group to its commit; the trainer's metrics
      sample                     from its group's creation to its last token
        lease                    from the grant to its end: engine, node, job, tokens

Ids are hashes of the ledger's: whoever exports a step again has the same trace. A step that a later attempt generated again is another
one, and has none of what only the earlier attempt generated. An agent's turn is a sample of the step that was under way when it was
asked for. Times are the ledger's.

Boundary: what a span is; `otlp` sends them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import sqlalchemy as sa

from scavenger.errors import LedgerError

Row = Mapping[str, Any]
Value = str | int | float | bool
#: Samples of one step that are exported (and four times as many leases), and metrics. The step's span says what is cut: `CUT`.
MOST_SAMPLES = 50_000
MOST_TEXT = 256
MOST_METRICS = 500
CUT = "scavenger.cut"

_RUN = """
SELECT r.run_id, r.name, (SELECT g.timeline FROM v_generations g ORDER BY g.generation DESC LIMIT 1) AS timeline
FROM v_runs r WHERE r.name = :run ORDER BY r.run_id DESC LIMIT 1"""
_STEPS = """
SELECT step FROM v_steps WHERE run_id = :run_id AND purpose = 'train' AND rewound_by IS NULL AND step > :after ORDER BY step"""
_STEP = """
SELECT step, attempt, version, metrics, committed_at FROM v_steps
WHERE run_id = :run_id AND purpose = 'train' AND rewound_by IS NULL AND step = :step"""
#: What the attempt took, or had generated: an earlier attempt's sample that it did not take is no part of its step.
_OF_ATTEMPT = """
g.run_id = :run_id AND g.purpose IN ('train', 'turn') AND g.step = :step AND (s.ended_attempt = :attempt OR g.created_at >=
  (SELECT a.started_at FROM v_attempts a WHERE a.run_id = :run_id AND a.attempt = :attempt))"""
_SAMPLES = f"""
SELECT s.sample_id, s.group_id, s.state, s.reason, s.finish, s.accepted_len, s.moves, s.regenerated, s.reward, s.advantage,
       g.created_at, s.finished_at, s.ended_at, g.version, g.prompt_tokens, g.purpose
FROM v_groups g JOIN v_samples s ON s.group_id = g.group_id
WHERE {_OF_ATTEMPT} ORDER BY s.sample_id LIMIT :most"""
_LEASES = f"""
SELECT l.sample_id, l.epoch, l.worker_id, l.version, l.start_len, l.end_len, l.regenerated, l.reason, l.granted_at, l.ended_at,
       w.kind, w.node, w.job_id
FROM v_groups g JOIN v_samples s ON s.group_id = g.group_id JOIN v_leases l ON l.sample_id = s.sample_id
LEFT JOIN v_workers w ON w.worker_id = l.worker_id
WHERE {_OF_ATTEMPT} ORDER BY l.sample_id, l.epoch LIMIT :most"""


@dataclass(frozen=True, slots=True)
class Span:
    """`trace_id` has 16 bytes, `span_id` and `parent_id` 8; b"" = no parent. Times are Unix seconds."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    name: str
    begin: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    failed: str = ""


@dataclass(frozen=True, slots=True)
class TracedRun:
    """`timeline`: the ledger's history, without which two ledgers' run 1 would be one trace."""

    run_id: int
    name: str
    timeline: str


def trace_id(run: TracedRun, step: int, attempt: int) -> bytes:
    text = f"{run.timeline} run {run.run_id} step {step} attempt {attempt}"
    return hashlib.sha256(text.encode()).digest()[:16]


def span_id(*parts: str | int) -> bytes:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:8]


def find(connection: sa.Connection, name: str) -> TracedRun:
    """The newest run of this name. Raises `LedgerError` where there is none."""
    found = connection.execute(sa.text(_RUN), {"run": name}).mappings().first()
    if found is None:
        raise LedgerError(
            f"the ledger has no run {name[:MOST_TEXT]!r}", "`scavenger ledger report runs` lists them"
        )
    return TracedRun(found["run_id"], found["name"], found["timeline"] or "")


def committed(connection: sa.Connection, run: TracedRun, after: int) -> list[int]:
    """The surviving train steps beyond `after`, ascending."""
    return list(connection.execute(sa.text(_STEPS), {"run_id": run.run_id, "after": after}).scalars())


def read(connection: sa.Connection, run: TracedRun, step: int) -> list[Span]:
    """The trace of a committed step. Raises `LedgerError` where it is none."""
    which = {"run_id": run.run_id, "step": step}
    found = connection.execute(sa.text(_STEP), which).mappings().first()
    if found is None:
        raise LedgerError(f"step {step} of run {run.name[:MOST_TEXT]!r} is not committed", "name one that is")
    which["attempt"] = found["attempt"]
    # One more of each than is exported: what is cut must be known.
    samples = connection.execute(sa.text(_SAMPLES), {**which, "most": MOST_SAMPLES + 1}).mappings().all()
    leases = connection.execute(sa.text(_LEASES), {**which, "most": 4 * MOST_SAMPLES + 1}).mappings().all()
    return list(spans(run, dict(found), [dict(row) for row in samples], [dict(row) for row in leases]))


def spans(
    run: TracedRun, step: Row, samples: list[dict[str, Any]], leases: list[dict[str, Any]]
) -> Iterator[Span]:
    """Root first, then each sample before its leases. What is beyond the limits is left out, and the root names it."""
    metrics = _metrics(step["metrics"])
    counts = (len(samples), MOST_SAMPLES), (len(leases), 4 * MOST_SAMPLES), (len(metrics), MOST_METRICS)
    cut = [
        f"{what} beyond {most}"
        for what, (n, most) in zip(("samples", "leases", "metrics"), counts, strict=True)
        if n > most
    ]
    samples, leases = samples[:MOST_SAMPLES], leases[: 4 * MOST_SAMPLES]
    number, attempt = step["step"], step["attempt"]
    trace, root = trace_id(run, number, attempt), span_id("step", run.run_id, number, attempt)
    end = float(step["committed_at"])
    begin = min([float(row["created_at"]) for row in samples], default=end)
    attributes: dict[str, Value] = {"scavenger.run": run.name[:MOST_TEXT], "scavenger.run_id": run.run_id}
    attributes |= {f"scavenger.{name}": step[name] for name in ("step", "attempt", "version")}
    attributes |= {
        f"scavenger.metric.{name[:64]}": value for name, value in islice(metrics.items(), MOST_METRICS)
    }
    if cut:
        attributes[CUT] = ", ".join(cut)
    yield Span(trace, root, b"", f"step {number}", min(begin, end), end, attributes)
    by_sample: dict[int, list[dict[str, Any]]] = {}
    for row in leases:
        by_sample.setdefault(row["sample_id"], []).append(row)
    for row in samples:
        own = span_id("sample", row["sample_id"])
        until = row["finished_at"] or row["ended_at"] or end
        yield Span(
            trace,
            own,
            root,
            "sample",
            float(row["created_at"]),
            max(float(row["created_at"]), float(until)),
            _named(
                row,
                (
                    "sample_id",
                    "group_id",
                    "state",
                    "finish",
                    "accepted_len",
                    "moves",
                    "regenerated",
                    "reward",
                    "advantage",
                ),
                ("version", "prompt_tokens", "purpose"),
            ),
            row["reason"] if row["state"] in ("poisoned", "masked") else "",
        )
        for lease in by_sample.get(row["sample_id"], ()):
            yield Span(
                trace,
                span_id("lease", lease["sample_id"], lease["epoch"]),
                own,
                f"lease {lease['epoch']}",
                float(lease["granted_at"]),
                max(float(lease["granted_at"]), float(lease["ended_at"] or end)),
                _named(
                    lease,
                    (
                        "sample_id",
                        "epoch",
                        "worker_id",
                        "version",
                        "start_len",
                        "end_len",
                        "regenerated",
                        "reason",
                    ),
                    ("kind", "node", "job_id"),
                ),
            )


def _named(row: Row, *names: tuple[str, ...]) -> dict[str, Value]:
    return {
        f"scavenger.{name}": row[name][:MOST_TEXT] if isinstance(row[name], str) else row[name]
        for some in names
        for name in some
        if row[name] is not None
    }


def _metrics(text: str) -> dict[str, float]:
    """Finite numbers of a step's metrics; none where they are no object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {
        str(name): float(value)
        for name, value in items
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }
