"""A small site that plays by itself, for `scavenger top --demo`: no daemon, no ledger, no Slurm. Pure, and the same every time.

    seconds since the start --play--> Inputs, as a feed would have read them

Other users come to nodes and leave; engines lose their GPUs and start elsewhere; samples move with their tokens; a run commits its steps.

Boundary: a second feed, beside `feed`; it shows what the application can show and is tested with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.text import Text

from scavenger.errors import ScavengerError
from scavenger.observe.fleet import EngineNow, NodeGpus, RunNow
from scavenger.top import text
from scavenger.top.view import DaemonFacts, Inputs, LedgerFacts, Row

RUN, PARTITION, HOST = "demo", "scavenge", "login1"
GPUS, NODES = 8, 6
STEP_S, STEP_SAMPLES = 24, 256
#: An engine takes so many of a step's samples; the training job's own engines have the rest.
SLOTS = 10
#: The site has been at it for so long when it is first shown.
BEFORE_S = 150
_KEPT = 80  # rows of each kind


def draw(*key: int) -> float:
    """A number of [0, 1) that depends on the key alone."""
    state = 0x9E3779B97F4A7C15
    for part in key:
        state = (state ^ (part + 0x632BE59BD9B4E019)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state ^= state >> 29
    return (state >> 11) / 2**53


@dataclass(slots=True)
class _Engine:
    id: int
    node: int
    began: int
    samples: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Site:
    """Seconds count from the start. `reserved`: samples of the training job's own engines."""

    other: list[int] = field(default_factory=lambda: [3, 0, 4, 2, 0, 8])
    drained: dict[int, str] = field(default_factory=dict)
    engines: list[_Engine] = field(default_factory=list)
    next_id: int = 1
    reserved: list[int] = field(default_factory=list)
    departures: list[Row] = field(default_factory=list)
    moves: list[Row] = field(default_factory=list)
    decisions: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)


def name(node: int) -> str:
    return f"gpu{node + 1:02}"


def tokens_of(sample: int, at: int) -> int:
    """How long a sample is after so many seconds."""
    return int(40 + 1500 * draw(sample, 7) * (0.2 + (at % STEP_S) / STEP_S))


def ends_at(sample: int) -> int:
    """The second of its step at which a sample is whole: few are long."""
    return 4 + int((STEP_S - 6) * draw(sample, 8) ** 2)


def play(until: int, origin: float, drained: dict[int, str] | None = None) -> Inputs:
    """The site `until` seconds after its start, which was at `origin` (Unix s). `drained`: nodes that the user drained, by number."""
    site = _Site(drained=drained or {})
    for second in range(until + 1):
        _second(site, second, origin)
    return _inputs(site, until, origin)


def _second(site: _Site, second: int, origin: float) -> None:
    at = origin + second
    _samples_of(site, second)
    if second and not second % STEP_S:
        step = second // STEP_S
        metrics = {
            "reward": 0.75 - 0.6 * math.exp(-step / 12) + 0.05 * draw(step, 1),
            "seconds": STEP_S + 2 * draw(step, 2),
            "seconds_wait": 1 + 3 * draw(step, 3),
            "staleness_mean": 0.0,
            "staleness_max": 0.0,
            "tokens_harvested": 120_000 + 20_000 * draw(step, 4),
            "tokens_reserved": 60_000 + 5_000 * draw(step, 5),
        }
        row = {"step": step, "version": step, "metrics": json.dumps(metrics), "committed_at": at}
        site.steps.insert(0, row)
    if not second % 5:
        node = int(NODES * draw(second, 11))
        site.other[node] = min(GPUS, int((GPUS + 1) * draw(second, 12)))
    for node in range(NODES):
        mine = [engine for engine in site.engines if engine.node == node]
        room = GPUS - site.other[node]
        gone = mine if node in site.drained else mine[room:]
        site.engines = [engine for engine in site.engines if engine not in gone]
        for engine in gone:
            _leaves(site, engine, second, at, drained=node in site.drained)
        if second % 3 == 0 and node not in site.drained and len(mine) < room - 1 and len(site.engines) < 20:
            engine = _Engine(site.next_id, node, second)
            site.next_id += 1
            engine.samples, site.reserved = site.reserved[:SLOTS], site.reserved[SLOTS:]
            site.engines.append(engine)
            why = f"{room} GPUs idle on {name(node)}, 1 more engine is wanted by {RUN}"
            _decided(site, at, "submit", "wanted", name(node), why)
    site.departures, site.moves = site.departures[:_KEPT], site.moves[:_KEPT]
    site.decisions, site.steps = site.decisions[:_KEPT], site.steps[:20]


def _samples_of(site: _Site, second: int) -> None:
    """A step's samples are dealt out at its beginning, and each leaves when it is whole."""
    step, into = divmod(second, STEP_S)
    if not into:
        site.reserved = [step * STEP_SAMPLES + number for number in range(1, STEP_SAMPLES + 1)]
        for engine in site.engines:
            engine.samples, site.reserved = site.reserved[:SLOTS], site.reserved[SLOTS:]
        return
    site.reserved = [sample for sample in site.reserved if ends_at(sample) > into]
    for engine in site.engines:
        engine.samples = [sample for sample in engine.samples if ends_at(sample) > into]


def _leaves(site: _Site, engine: _Engine, second: int, at: float, *, drained: bool) -> None:
    others = site.engines
    kept = 0
    for place, sample in enumerate(engine.samples):
        length = tokens_of(sample, second)
        kept += length
        to = others[(engine.id + place) % len(others)] if others else None
        (to.samples if to is not None else site.reserved).append(sample)
        site.moves.insert(
            0,
            {
                "sample_id": sample,
                "step": second // STEP_S + 1,
                "state": "open",
                "from_worker": engine.id,
                "reason": "preempted" if not drained else "drained",
                "kept_len": length,
                "regenerated": 0,
                "at": at,
                "to_worker": to.id if to is not None else 0,
                "to_node": name(to.node) if to is not None else None,
            },
        )
    site.departures.insert(
        0,
        {
            "worker_id": engine.id,
            "run": RUN,
            "kind": "harvested",
            "node": name(engine.node),
            "left_at": at,
            "reason": "goodbye",
            "notice": True,
            "samples": len(engine.samples),
            "salvaged": kept,
            "regenerated": 0,
            "allocation_end": "completed" if drained else "preempted",
        },
    )
    if drained:
        why = f"{site.drained[engine.node]}; it holds {len(engine.samples)} leases"
        _decided(site, at, "drain", "node_drained", name(engine.node), why)


def _decided(site: _Site, at: float, action: str, code: str, node: str, reason: str) -> None:
    number = int(site.decisions[0]["id"]) + 1 if site.decisions else 1
    inputs = json.dumps({"decision": reason, "demand": [[RUN, 20, 1]], "start_benefits": []})
    site.decisions.insert(
        0,
        {
            "id": number,
            "at": at,
            "policy": "harvest",
            "action": action,
            "subject": f"scv-{number:016x}",
            "code": code,
            "reason": reason,
            "inputs": inputs,
            "node": node,
            "cluster": "",
        },
    )


def _inputs(site: _Site, until: int, origin: float) -> Inputs:
    now = origin + until
    step, into = until // STEP_S + 1, until % STEP_S
    engines = [_engine(engine, until, origin, step) for engine in site.engines]
    nodes = [NodeGpus("train01", reserved=GPUS)]
    for node in range(NODES):
        harvested = sum(engine.node == node for engine in site.engines)
        idle = GPUS - site.other[node] - harvested
        nodes.append(
            NodeGpus(
                name(node),
                other_users=site.other[node],
                harvested=harvested,
                idle=idle,
                why=site.drained.get(node, ""),
            )
        )
    nodes.append(NodeGpus("gpu07", out=GPUS, why="drain: memory errors"))
    idle = sum(node.idle for node in nodes)
    concluded = (
        f"max_engines = 20 is reached (draining ones count); {idle} GPUs idle"
        if len(engines) >= 20
        else f"{idle} GPUs idle, headroom {NODES}; quarantined: gpu07"
    )
    phase = "seed" if into < 6 else "train" if into < STEP_S - 3 else "finish"
    left = len(site.reserved) + sum(len(engine.samples) for engine in site.engines)
    run = RunNow(
        RUN,
        "train",
        step,
        phase,
        STEP_SAMPLES,
        left,
        into,
        step - 1,
        step,
        now - into,
        now - 1,
        "the engines are 1.4 x as fast",
    )
    daemon = DaemonFacts(
        now - until % 10,
        3,
        HOST,
        "",
        "OK",
        True,
        PARTITION,
        now - until % 5,
        concluded,
        jobs_pending_other_users=int(4 * draw(until // 5, 21)),
        nodes=tuple(nodes),
        engines=tuple(engines),
        runs=(run,),
        training={RUN: "job 4211 RUNNING"},
    )
    row = {
        "run_id": 1,
        "name": RUN,
        "state": "active",
        "reason": "",
        "attempt": 1,
        "last_step": step - 1,
        "last_version": step,
    }
    samples = [
        {
            "sample_id": sample,
            "run": RUN,
            "step": step,
            "prompt_index": sample % 32,
            "state": "open",
            "accepted_len": tokens_of(sample, until),
            "moves": sum(move["sample_id"] == sample for move in site.moves),
            "reward": None,
            "worker_id": engine.id,
            "node": name(engine.node),
        }
        for engine in site.engines
        for sample in engine.samples[:40]
    ]
    samples.sort(key=lambda one: (-int(str(one["moves"])), -int(str(one["accepted_len"]))))
    ledger = LedgerFacts(
        now,
        [row],
        {1: list(site.steps)},
        (),
        list(site.departures),
        {1: list(site.moves)},
        {1: samples[:200]},
        list(site.decisions),
    )
    return Inputs(now, daemon, "", ledger)


def _engine(engine: _Engine, until: int, origin: float, step: int) -> EngineNow:
    held = sum(tokens_of(sample, until) + 200 for sample in engine.samples)
    return EngineNow(
        engine.id,
        RUN,
        "harvested",
        name(engine.node),
        1,
        9000 + engine.id,
        "ready" if until - engine.began > 4 else "loading",
        step if until % STEP_S > 2 else step - 1,
        len(engine.samples),
        float(len(engine.samples)) * (38 + 6 * draw(engine.id, until)) if until - engine.began > 4 else 0.0,
        held,
        60_000,
        origin + engine.began,
        600 + 2400 * draw(engine.id, 9),
    )


class RecordedFeed:
    """The site as a feed. `clock`: Unix seconds; it began `BEFORE_S` before the first reading. Each second is played once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._origin = clock() - BEFORE_S
        self._site, self._played = _Site(), -1

    def read(self) -> Inputs:
        now = max(self._played, int(self._clock() - self._origin))
        for second in range(self._played + 1, now + 1):
            _second(self._site, second, self._origin)
        self._played = now
        return _inputs(self._site, now, self._origin)

    def sample(self, sample_id: int) -> list[Text]:
        ledger = self.read().ledger
        assert ledger is not None
        found = [row for row in ledger.samples[1] if row["sample_id"] == sample_id]
        went = [
            f"left engine {row['from_worker']} with {row['kept_len']:,} tokens for engine {row['to_worker']}"
            for row in ledger.moves[1]
            if row["sample_id"] == sample_id
        ]
        facts = (
            {what: found[0][what] for what in ("run", "step", "state", "accepted_len", "node")}
            if found
            else {}
        )
        return text.detail(f"sample {sample_id}", facts, [("where it went", went or ["it did not move"])])

    def node(self, name: str) -> list[Text]:
        daemon = self.read().daemon
        assert daemon is not None
        facts = {node.name: node for node in daemon.nodes}
        if name not in facts:
            raise ScavengerError(f"there is no node {name}")
        node = facts[name]
        names = ("reserved", "other_users", "harvested", "draining", "idle", "out", "why")
        return text.detail(f"node {name}", {what: getattr(node, what) for what in names})

    def decision(self, decision_id: int) -> list[Text]:
        ledger = self.read().ledger
        assert ledger is not None
        for row in ledger.decisions:
            if row["id"] == decision_id:
                return text.decision_detail(row, json.dumps(json.loads(row["inputs"]), indent=2).splitlines())
        raise ScavengerError(f"there is no decision {decision_id} any more")

    def may_not_drain(self) -> str:
        return ""

    def drain(self, node: str, *, off: bool) -> str:
        chosen = [number for number in range(NODES) if node in ("", name(number))]
        for number in chosen:
            if off:
                self._site.drained.pop(number, None)
            else:
                self._site.drained[number] = f"{name(number)} is drained by scavenger top --demo"
        return f"{'undrained' if off else 'drains'} {', '.join(map(name, chosen)) or 'nothing'} (of the demo)"
