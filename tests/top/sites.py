"""A daemon's status and ledger for the tests of `scavenger top`: a site as the demo's, and one on which every text is hostile."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import msgspec

from scavenger import toml
from scavenger.ledger import records as r
from scavenger.observe import status
from scavenger.observe.fleet import EngineNow, NodeGpus, RunNow
from scavenger.observe.training import TrainingJob
from tests.ledger.examples import CONFIG, T0, consumed, moved_group, preempted, prologue, written

#: What a name may do to a terminal, to markup, and to a layout.
EVIL = "\x1b[2J\x07[bold red]x[/]\u202e\u2066\r\nline\ttwo [@click=app.quit]quit[/] \ud83d" + "w" * 5_000
EVIL_STORED = EVIL.replace("\ud83d", "\ufffd")  # a database takes no half of a pair
METRICS = {
    "reward": 0.5,
    "seconds": 40.0,
    "seconds_wait": 10.0,
    "staleness_mean": 0.25,
    "staleness_max": 1.0,
    "tokens_harvested": 8000.0,
    "tokens_reserved": 2000.0,
}
NODES = (
    NodeGpus("node0", reserved=4),
    NodeGpus("node1", other_users=2, harvested=1, idle=1),
    NodeGpus("node2", harvested=1, draining=1, idle=2),
    NodeGpus("node3", out=4, why="drain, mixed"),
)
ENGINES = (
    EngineNow(2, "sorting", "reserved", "node0", 1, 100, "ready", 1, 2, 900.0, 0, 0, T0 + 4),
    EngineNow(
        3, "sorting", "harvested", "node1", 1, 503, "ready", 1, 30, 1800.0, 30_000, 60_000, T0 + 4, 750.0
    ),
    EngineNow(4, "sorting", "harvested", "node2", 1, 504, "draining", 0, 0, 0.0, 0, 60_000, T0 + 4, None),
)
RUN = RunNow("sorting", "train", 2, "wake", 64, 20, 3, 1, 2, T0 + 12, T0 + 29, "harvested engines are slow")


def records() -> list[list[r.Record]]:
    """A run with a committed step, a second one of which a sample lost its engine, decisions, events, polls."""
    second = [
        *moved_group(20, 21, 2, 1),
        r.GroupCreated(30, 1, "train", 2, 0, 0, 1, b"\7\0\0\0", 2, 31, '{"max_tokens": 64}', "{}", T0),
        r.LeaseGranted(31, 1, 2, 1, 0, T0 + 20),
        r.LeaseEnded(31, 1, "worker left", 0, 0, T0 + 21),
        r.LeaseGranted(32, 1, 2, 1, 0, T0 + 20),
    ]
    committed = [
        one
        if not isinstance(one, r.StepCommitted)
        else msgspec.structs.replace(one, metrics=json.dumps(METRICS))
        for one in consumed()
    ]
    decided = [
        r.Decision(
            "harvest",
            "none",
            "",
            "1 idle GPU",
            json.dumps({"decision": "max_engines = 2 is reached", "demand": [["sorting", 4, 1]]}),
            T0 + 14,
            "max_engines",
        ),
        r.ClusterPolled(3, 2, 2, 4, 4, 5, T0 + 25),
    ]
    return [prologue(), moved_group(), preempted(), committed, second, decided]


def hostile() -> list[list[r.Record]]:
    """The same words in every text that somebody else chooses."""
    x = EVIL_STORED
    return [
        [
            r.RunCreated(1, x, x, 17, CONFIG, x, x, T0),
            r.AttemptGranted(1, 1, x, 100, 0, CONFIG, x, T0),
            r.VersionPublished(1, 1, 0, 1, b"root1", b"manifest1", 4096, T0),
            r.JobIntended(x, 1, x, 1, x, T0, x),
            r.JobSubmitted(x, 501, T0 + 1),
            r.JobObserved(x, 501, x, x, x, x, 0, T0 + 3),
            r.AllocationStarted(x, 0, 501, x, 1, T0 + 3),
            r.WorkerJoined(1, 1, x, x, x, 0, 501, x, 1, x, T0 + 4),
            r.WorkerJoined(2, 1, x, "", x, 0, 501, x, 1, x, T0 + 4),
            r.Decision(x, x, x, x, json.dumps({"decision": x, "deep": [[x]]}), T0, x),
            r.Event(x, 1, x, x, x, T0 + 5),
            r.Event("node_quarantined", 1, x, x, x, T0 + 5),
        ],
        [
            r.GroupCreated(10, 1, "train", 1, 0, 0, 1, b"\7\0\0\0", 2, 11, '{"max_tokens": 64}', x, T0),
            r.LeaseGranted(11, 1, 1, 1, 0, T0 + 6),
            r.LeaseEnded(11, 1, x, 0, 2, T0 + 8),
            r.LeaseGranted(11, 2, 2, 1, 0, T0 + 9),
            r.WorkerLeft(1, x, False, 1, 5, 2, T0 + 8),
            r.AllocationEnded(x, 0, x, T0 + 9),
            r.EngineDied(x, 1, x, 501, 1, 70, x, 2.0, T0 + 10),
            r.NodeQuarantined(x, x, T0 + 610, T0 + 10),
            r.SampleEnded(12, "filtered", x, 1, 1, 1.0, 0.7, T0 + 11, x),
            r.StepCommitted(1, 1, "train", 1, 1, json.dumps({"reward": x, "seconds": [x], x: 1}), T0 + 12),
        ],
    ]


def status_of(at: float, *, evil: bool = False) -> status.Status:
    """Of a daemon in this process, written `at` (Unix s)."""
    x = EVIL_STORED
    harvest = status.Harvest(
        x if evil else "scavenge",
        2,
        2,
        0,
        1,
        at - 7,
        3,
        2,
        5,
        "",
        x if evil else "max_engines = 2 is reached",
        nodes=NODES
        if not evil
        else (NodeGpus(x, harvested=2, idle=2, why=x), NodeGpus(f"b{x}", other_users=200, why=x)),
    )
    return status.Status(
        at,
        3,
        socket.gethostname(),
        os.getpid(),
        at - 500,
        "OK",
        x if evil else "",
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        harvest=harvest,
        training=(TrainingJob(x if evil else "sorting", 100, x if evil else "RUNNING"),),
        engines=ENGINES
        if not evil
        else (EngineNow(2, x, x, x, 1, 501, x, 1, 1, 5.0, 10, 100, T0 + 4, 60.0),),
        runs=(RUN,) if not evil else (RunNow(x, x, 2, x, 64, 20, 3, 1, 2, T0, T0, x),),
    )


def site(folder: Path, submissions: list[list[r.Record]] | None = None) -> Path:
    """A ledger of these submissions, and the configuration that leads to it. No status: `status.write` makes one."""
    state_dir = folder / "state"
    written(f"sqlite:///{state_dir / 'ledger.sqlite3'}", records() if submissions is None else submissions)
    path = folder / "scavenger.toml"
    path.write_text(toml.dumps({"daemon": {"state_dir": str(state_dir)}}))
    return path
