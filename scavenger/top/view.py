"""What `scavenger top` shows, as one value: made of the daemon's status and rows of the ledger. Pure.

    Inputs (status as it was written, rows as they were read, the clock)  --build-->  View

Owns the record that `--once --json` prints (its fields are added to, never renamed, within one `schema`), the words, and that no text of
others reaches a terminal as it came: every string of a `View` went through `clean`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from scavenger.observe.fleet import EngineNow, NodeGpus, RunNow
from scavenger.printable import printable

SCHEMA = 1
#: Of one text of others; what is longer ends in an ellipsis.
MOST_CHARS = 400
MOST_EVENTS = 300
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """What the daemon last said. Times: Unix seconds. `gone`: why none serves, "" when one does. `training`: by run, its job in words.

    `conditions`: what keeps harvesting down besides the decision, each in a sentence, the gravest first.
    """

    at: float
    generation: int
    host: str
    gone: str
    ledger_state: str = ""
    harvests: bool = False
    partition: str = ""
    polled_at: float = 0.0
    concluded: str = ""
    conditions: tuple[str, ...] = ()
    stopped: str = ""
    jobs_pending_other_users: int = 0
    nodes: tuple[NodeGpus, ...] = ()
    engines: tuple[EngineNow, ...] = ()
    runs: tuple[RunNow, ...] = ()
    training: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """Rows of the queries `sql/ledger/top_*.sql`, which name the columns. `steps`, `moves`, `samples`: by run id. `at`: the last commit."""

    at: float
    runs: Sequence[Row] = ()
    steps: Mapping[int, Sequence[Row]] = field(default_factory=dict)
    engines: Sequence[Row] = ()
    departures: Sequence[Row] = ()
    moves: Mapping[int, Sequence[Row]] = field(default_factory=dict)
    samples: Mapping[int, Sequence[Row]] = field(default_factory=dict)
    decisions: Sequence[Row] = ()
    concluded: Row | None = None
    events: Sequence[Row] = ()
    poll: Row | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """One moment. `no_daemon`, `no_ledger`: why there are no such facts."""

    now: float
    daemon: DaemonFacts | None = None
    no_daemon: str = ""
    ledger: LedgerFacts | None = None
    no_ledger: str = ""


# ---------------------------------------------------------------- what is shown


class Gpus(msgspec.Struct, frozen=True):
    """GPUs by who has them, as in `NodeGpus`."""

    reserved: int = 0
    other_users: int = 0
    harvested: int = 0
    draining: int = 0
    idle: int = 0
    out: int = 0


class NodeView(msgspec.Struct, frozen=True):
    """`engines`: that are connected there. `why`: why it is out, or gets no engine."""

    name: str
    gpus: Gpus
    engines: int
    why: str


class EngineView(msgspec.Struct, frozen=True):
    """`behind`: versions published since its own; None: not known. `kv_use`: share of its KV cache, 0 to 1. `life_s`: expected yet."""

    worker_id: int
    run: str
    kind: str
    node: str
    gpus: int
    job_id: int
    state: str
    samples: int
    tokens_per_s: float | None
    kv_use: float | None
    version: int | None
    behind: int | None
    life_s: float | None
    age_s: float


class RunView(msgspec.Struct, frozen=True):
    """One run. `step`: under way, or the last one; metrics are the last committed step's. `waits`: share of its seconds in which the
    trainer waited for samples, 0 to 1. `staleness_*`: in optimizer steps. `rewards`: of the last steps, the oldest first.
    `tokens_per_s_*`: what engines generate now by kind, None without a daemon; `step_tokens_*`: of the last committed step, by
    who generated them.
    """

    run_id: int
    name: str
    state: str
    reason: str
    step: int
    last_step: int
    purpose: str
    phase: str
    phase_reason: str
    samples: int
    samples_open: int
    groups_trained: int
    attempt: int
    version: int
    engine_versions: dict[int, int]
    step_s: float | None
    waits: float | None
    staleness_mean: float | None
    staleness_max: float | None
    reward: float | None
    rewards: tuple[float, ...]
    tokens_per_s_reserved: float | None
    tokens_per_s_harvested: float | None
    step_tokens_reserved: float | None
    step_tokens_harvested: float | None
    training_job: str
    trainer_silent_s: float | None


class EventView(msgspec.Struct, frozen=True):
    """`sample_id`, `node`: what it is about, 0 and "" for nothing of the kind."""

    at: float
    kind: str
    run: str
    text: str
    sample_id: int = 0
    node: str = ""


class DecisionView(msgspec.Struct, frozen=True):
    id: int
    at: float
    policy: str
    action: str
    subject: str
    code: str
    reason: str
    node: str = ""
    cluster: str = ""


class SampleView(msgspec.Struct, frozen=True):
    """`worker_id`, `node`: who generates it, 0 and "" where nobody does."""

    sample_id: int
    run: str
    step: int
    group: int
    state: str
    tokens: int
    moves: int
    reward: float | None
    worker_id: int
    node: str


class View(msgspec.Struct, frozen=True):
    """Everything at one moment; ages in seconds, times in Unix seconds. `daemon`: "SERVING", or why none serves. `poll_age_s`: of what is
    known of nodes and queue. `why_not_more`: why there are not more engines now. `problems`: what could not be read, with the remedy."""

    schema: int
    at: float
    daemon: str
    host: str
    generation: int
    status_age_s: float | None
    ledger_age_s: float | None
    partition: str
    polled_at: float
    poll_age_s: float | None
    jobs_pending_other_users: int
    stopped: str
    why_not_more: str
    gpus: Gpus
    nodes: tuple[NodeView, ...]
    runs: tuple[RunView, ...]
    engines: tuple[EngineView, ...]
    samples: tuple[SampleView, ...]
    events: tuple[EventView, ...]
    decisions: tuple[DecisionView, ...]
    problems: tuple[str, ...]


SERVING = "SERVING"


# ---------------------------------------------------------------- pure


def clean(text: object, most: int = MOST_CHARS) -> str:
    """One line that a terminal shows as it reads: no control character, no line break, no half of a surrogate pair, no endless length."""
    # Cut first: of ten megabytes only the beginning is worth a look.
    given = "" if text is None else str(text)[: most + 1]
    line = printable(" ".join(given.encode("utf-8", "replace").decode().split()))
    return line if len(line) <= most else line[: most - 1] + "…"


def shown(text: object, most: int) -> str:
    """As `clean`, for one line of text or code: its spaces stay."""
    given = ("" if text is None else str(text)[: most + 1]).encode("utf-8", "replace").decode()
    line = printable(given.replace("\t", "    ").replace("\n", " "))
    return line if len(line) <= most else line[: most - 1] + "…"


def build(inputs: Inputs) -> View:
    """See the module. Any of the two sources may be missing."""
    daemon, ledger, now = inputs.daemon, inputs.ledger, inputs.now
    engines = _engines(daemon, ledger, now)
    nodes = _nodes(daemon, engines)
    polled_at = _polled_at(daemon, ledger)
    return View(
        SCHEMA,
        now,
        SERVING if daemon is not None and not daemon.gone else clean(_why_gone(inputs)),
        clean(daemon.host if daemon is not None else ""),
        daemon.generation if daemon is not None else 0,
        max(0.0, now - daemon.at) if daemon is not None else None,
        max(0.0, now - ledger.at) if ledger is not None and ledger.at else None,
        clean(daemon.partition if daemon is not None else ""),
        polled_at,
        max(0.0, now - polled_at) if polled_at else None,
        _pending(daemon, ledger),
        clean(daemon.stopped if daemon is not None else ""),
        clean(why_not_more(inputs)),
        _gpus(nodes, ledger),
        nodes,
        _runs(daemon, ledger, engines, now),
        engines,
        _samples(ledger),
        _events(ledger),
        _decisions(ledger),
        tuple(clean(said) for said in (inputs.no_daemon, inputs.no_ledger) if said),
    )


def why_not_more(inputs: Inputs) -> str:
    """One sentence: what stops harvesting, else the last harvest decision's own reason."""
    daemon, ledger = inputs.daemon, inputs.ledger
    concluded = daemon.concluded if daemon is not None else ""
    if not concluded and ledger is not None and ledger.concluded is not None:
        concluded = _whole_reason(ledger.concluded)
    if daemon is not None and not daemon.gone:
        if not daemon.harvests:
            return "nothing is harvested here (harvest.enabled = false)"
        if daemon.conditions:
            return daemon.conditions[0]
        return concluded or "nothing was decided yet"
    if daemon is None and ledger is not None and ledger.poll is None and not concluded:
        return f"this ledger has seen no cluster: a try (`--local`) uses this machine alone; else {_why_gone(inputs)}"
    what = "no daemon serves" if daemon is not None else "no daemon's status is here"
    # The decision first: what is gone may be named by a long path.
    decided = f"; its last decision: {concluded}" if concluded else ""
    return f"{what}{decided}; {_why_gone(inputs)}"


def _why_gone(inputs: Inputs) -> str:
    if inputs.daemon is not None:
        return inputs.daemon.gone
    return inputs.no_daemon or "its status was not read"


def _whole_reason(decision: Row) -> str:
    """A decision's row has the reason of its action; its inputs have that of the whole."""
    try:
        whole = json.loads(decision["inputs"]).get("decision")
    except (ValueError, TypeError, AttributeError, RecursionError):
        whole = None
    return str(whole or decision["reason"])


def _polled_at(daemon: DaemonFacts | None, ledger: LedgerFacts | None) -> float:
    if daemon is not None and daemon.polled_at:
        return daemon.polled_at
    return float(ledger.poll["at"]) if ledger is not None and ledger.poll is not None else 0.0


def _pending(daemon: DaemonFacts | None, ledger: LedgerFacts | None) -> int:
    if daemon is not None and daemon.polled_at:
        return daemon.jobs_pending_other_users
    poll = ledger.poll if ledger is not None else None
    return int(poll["jobs_pending_other_users"]) if poll is not None else 0


def _nodes(daemon: DaemonFacts | None, engines: Sequence[EngineView]) -> tuple[NodeView, ...]:
    if daemon is None:
        return ()
    there = Counter(engine.node for engine in engines)
    return tuple(
        NodeView(
            clean(node.name),
            Gpus(node.reserved, node.other_users, node.harvested, node.draining, node.idle, node.out),
            there[clean(node.name)],
            clean(node.why),
        )
        for node in daemon.nodes
    )


def _gpus(nodes: Sequence[NodeView], ledger: LedgerFacts | None) -> Gpus:
    """The sum over nodes; where none is known, what the ledger's last poll counted."""
    if nodes:
        return Gpus(*(sum(getattr(node.gpus, name) for node in nodes) for name in Gpus.__struct_fields__))
    poll = ledger.poll if ledger is not None else None
    if poll is None:
        return Gpus()
    return Gpus(
        poll["gpus_reserved"],
        poll["gpus_other_users"],
        poll["gpus_harvested"],
        0,
        poll["gpus_idle"],
        poll["gpus_unusable"],
    )


def _engines(daemon: DaemonFacts | None, ledger: LedgerFacts | None, now: float) -> tuple[EngineView, ...]:
    """Of a daemon that serves its own word; else those that the ledger has not seen leave."""
    if daemon is not None and not daemon.gone and (daemon.engines or ledger is None):
        newest = {run.run: run.version for run in daemon.runs}
        return tuple(_engine_now(engine, newest.get(engine.run, 0), now) for engine in daemon.engines)
    if ledger is None:
        return ()
    versions = {row["run_id"]: row["last_version"] for row in ledger.runs}
    return tuple(
        EngineView(
            row["worker_id"],
            clean(row["run"]),
            clean(row["kind"]),
            clean(row["node"]),
            row["gpus"],
            row["job_id"],
            "connected" if daemon is not None and not daemon.gone else "when last recorded",
            row["samples"],
            None,
            None,
            row["version"],
            _behind(row["version"], versions.get(row["run_id"], 0)),
            None,
            max(0.0, now - row["joined_at"]),
        )
        for row in ledger.engines
    )


def _engine_now(engine: EngineNow, newest: int, now: float) -> EngineView:
    version = engine.version if engine.version >= 0 else None
    return EngineView(
        engine.worker_id,
        clean(engine.run),
        clean(engine.kind),
        clean(engine.node),
        engine.gpus,
        engine.job_id,
        clean(engine.state),
        engine.samples,
        engine.tokens_per_s,
        min(1.0, engine.tokens_held / engine.cache_tokens) if engine.cache_tokens > 0 else None,
        version,
        _behind(version, newest),
        engine.life_s,
        max(0.0, now - engine.joined_at) if engine.joined_at else 0.0,
    )


def _behind(version: int | None, newest: int) -> int | None:
    return None if version is None or not newest else max(0, newest - version)


def _runs(
    daemon: DaemonFacts | None, ledger: LedgerFacts | None, engines: Sequence[EngineView], now: float
) -> tuple[RunView, ...]:
    serving = daemon is not None and not daemon.gone
    live = {run.run: run for run in daemon.runs} if daemon is not None else {}
    training = daemon.training if daemon is not None else {}
    if ledger is None:
        rows: Sequence[Row] = [_row_of(run) for run in live.values()]
    else:
        rows = ledger.runs
    found = []
    newest: set[str] = set()
    for row in rows:
        # Names come again: what the daemon says is of the newest run of that name, which is open.
        name = str(row["name"])
        now_of = live.get(name) if row["state"] == "active" and name not in newest else None
        newest.add(name)
        steps = ledger.steps.get(row["run_id"], ()) if ledger is not None else ()
        found.append(_run(row, steps, now_of, engines if now_of is not None else (), serving, training, now))
    return tuple(found)


def _row_of(run: RunNow) -> Row:
    """What the ledger's row would say, where only the daemon's word is there."""
    return {
        "run_id": 0,
        "name": run.run,
        "state": "active",
        "reason": "",
        "attempt": 0,
        "last_step": run.last_step,
        "last_version": run.version,
    }


def _run(
    row: Row,
    steps: Sequence[Row],
    live: RunNow | None,
    engines: Sequence[EngineView],
    serving: bool,
    training: Mapping[str, str],
    now: float,
) -> RunView:
    name = str(row["name"])
    metrics = _metrics(steps[0]["metrics"]) if steps else {}
    seconds, waited = metrics.get("seconds"), metrics.get("seconds_wait")
    mine = [engine for engine in engines if engine.run == clean(name)]
    rates: dict[str, float | None] = {"reserved": None, "harvested": None}
    if live is not None and serving:
        rates = {
            kind: sum(engine.tokens_per_s or 0.0 for engine in mine if engine.kind == kind) for kind in rates
        }
    rewards = [_metrics(step["metrics"]).get("reward") for step in reversed(steps)]
    return RunView(
        row["run_id"],
        clean(name),
        clean(row["state"]),
        clean(row["reason"]),
        live.step if live is not None else row["last_step"],
        row["last_step"],
        clean(live.purpose if live is not None else "train"),
        clean(live.phase if live is not None and serving else ""),
        clean(live.window_reason if live is not None and serving else ""),
        live.samples if live is not None else 0,
        live.samples_open if live is not None else 0,
        live.groups_trained if live is not None else 0,
        row["attempt"],
        row["last_version"],
        dict(sorted(Counter(engine.version for engine in mine if engine.version is not None).items())),
        seconds,
        min(1.0, max(0.0, waited / seconds)) if waited is not None and seconds else None,
        metrics.get("staleness_mean"),
        metrics.get("staleness_max"),
        metrics.get("reward"),
        tuple(reward for reward in rewards if reward is not None),
        rates["reserved"],
        rates["harvested"],
        metrics.get("tokens_reserved"),
        metrics.get("tokens_harvested"),
        clean(training.get(name, "")),
        max(0.0, now - live.trainer_seen_at) if live is not None and live.trainer_seen_at else None,
    )


def _metrics(text: object) -> dict[str, float]:
    """The numbers of a step's metrics. A trainer wrote them: what is no finite number is left out."""
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value)
    }


def _samples(ledger: LedgerFacts | None) -> tuple[SampleView, ...]:
    if ledger is None:
        return ()
    return tuple(
        SampleView(
            row["sample_id"],
            clean(row["run"]),
            row["step"],
            row["prompt_index"],
            clean(row["state"]),
            row["accepted_len"],
            row["moves"],
            row["reward"],
            row["worker_id"] or 0,
            clean(row["node"]),
        )
        for rows in ledger.samples.values()
        for row in rows
    )


def _decisions(ledger: LedgerFacts | None) -> tuple[DecisionView, ...]:
    if ledger is None:
        return ()
    return tuple(
        DecisionView(
            row["id"],
            row["at"],
            *(
                clean(row[name])
                for name in ("policy", "action", "subject", "code", "reason", "node", "cluster")
            ),
        )
        for row in ledger.decisions
    )


def _events(ledger: LedgerFacts | None) -> tuple[EventView, ...]:
    """The newest first."""
    if ledger is None:
        return ()
    names = {row["run_id"]: str(row["name"]) for row in ledger.runs}
    found = [*map(_departure, ledger.departures), *map(_event, ledger.events)]
    for run_id, rows in ledger.moves.items():
        found += [_move(row, names.get(run_id, "")) for row in rows]
    for run_id, steps in ledger.steps.items():
        found += [_step(row, names.get(run_id, "")) for row in steps]
    return tuple(sorted(found, key=lambda one: one.at, reverse=True)[:MOST_EVENTS])


def _departure(row: Row) -> EventView:
    kind = str(row["allocation_end"] or "left")
    notice = "" if row["notice"] is None else ", with notice" if row["notice"] else ", without notice"
    text = (
        f"engine {row['worker_id']} on {row['node']}: {row['salvaged']:,} tokens kept, {row['regenerated']:,} to generate again, "
        f"{row['samples']:,} samples in flight{notice} ({row['kind']}; {row['reason']})"
    )
    return EventView(row["left_at"], clean(kind), clean(row["run"]), clean(text), node=clean(row["node"]))


def _move(row: Row, run: str) -> EventView:
    if row["to_worker"]:
        went = f"went on at engine {row['to_worker']} on {row['to_node']}"
    elif row["state"] == "open":
        went = "waits for an engine"
    else:
        went = f"is {row['state']}"
    again = f", {row['regenerated']:,} to generate again" if row["regenerated"] else ""
    text = (
        f"sample {row['sample_id']} {went} with {row['kept_len']:,} tokens kept{again} "
        f"(step {row['step']}; engine {row['from_worker']}: {row['reason']})"
    )
    node = clean(row["to_node"] or "")
    return EventView(row["at"], "moved", clean(run), clean(text), row["sample_id"], node)


def _step(row: Row, run: str) -> EventView:
    metrics = _metrics(row["metrics"])
    figures = [
        f"{what} {metrics[name]:.{digits}f}{unit}"
        for name, what, digits, unit in (
            ("reward", "reward", 3, ""),
            ("seconds", "took", 0, " s"),
            ("seconds_wait", "waited", 0, " s"),
        )
        if name in metrics
    ]
    text = f"step {row['step']} committed on version {row['version']}{': ' if figures else ''}{', '.join(figures)}"
    return EventView(row["committed_at"], "step", clean(run), clean(text))


def _event(row: Row) -> EventView:
    about = f"{row['subject']}: " if row["subject"] else ""
    node = row["subject"] if str(row["kind"]).startswith("node_") else ""
    return EventView(
        row["at"], clean(row["kind"]), clean(row["run"]), clean(f"{about}{row['reason']}"), 0, clean(node)
    )


def count_of(gpus: Gpus) -> int:
    """All of them."""
    return sum(getattr(gpus, name) for name in Gpus.__struct_fields__)
