"""What schedules reached: every row of every table, and which fault met which state. `python -m tests.router.coverage` prints it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from scavenger.protocol.worker.events import WorkerPhase
from scavenger.protocol.worker.session import PHASE_TRANSITIONS
from scavenger.router.core.state import Sample, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import (
    SAMPLE_TRANSITIONS,
    WORKER_TRANSITIONS,
    SampleStatus,
    SampleStep,
    WorkerStatus,
    WorkerStep,
)

#: Where one event may bring a worker, by one step of the core's table or by several. "-": not there.
WITHIN_ONE_EVENT: dict[str, tuple[str, ...]] = {
    "-": ("loading", "ready", "falling-asleep", "asleep", "draining", "away"),
    "loading": ("ready", "falling-asleep", "draining", "handing-over", "-"),
    "ready": ("loading", "falling-asleep", "draining", "handing-over", "-"),
    "handing-over": ("draining", "-"),
    "falling-asleep": ("asleep", "loading", "ready", "draining", "-"),
    "asleep": ("loading", "ready", "draining", "-"),
    "draining": ("-",),
    "away": ("loading", "ready", "falling-asleep", "asleep", "draining", "-"),
}
_SAMPLES = tuple(f"sample {s}" for s in ("queued", "leased", "unconfirmed", "complete"))  # demanded
_ENDED = "sample ended"  # the core forgets an ended sample as soon as its group has ended
_JOBS = tuple(f"worker {s}" for s in ("loading", "ready", "draining", "away", "unknown"))
_ENGINES = (*_JOBS, "worker falling-asleep", "worker asleep")
_TRAINERS = tuple(f"trainer {s}" for s in ("open", "publish", "submit", "collect", "commit"))
#: Which fault must have met which states. A job's faults meet no sleeper: only reserved engines sleep, and they have no job. An engine can
#: fail a request, or lie of one, where it holds one: `ready`, and what its daemon may take it for meanwhile.
FAULTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("SIGTERM", "engine dies", "killed", "stopped", "goes on", "clock jumps", "connection lost"), _ENGINES
    ),
    **dict.fromkeys(
        (
            "given back",
            *(f"scheduler: {r}" for r in ("PREEMPTED", "NODE_FAIL", "CANCELLED", "FAILED", "REQUEUED")),
        ),
        _JOBS,
    ),
    **dict.fromkeys(
        ("clock of the daemon jumps", "commit fails", "daemon killed", "daemon superseded"), _SAMPLES
    ),
    **dict.fromkeys(
        ("daemon killed before its commit", "daemon killed before the commit's answer"), _SAMPLES
    ),
    **dict.fromkeys(("trainer killed", "second trainer", "trainer connects again"), _TRAINERS),
    **dict.fromkeys(
        (
            f"lies: {lie}"
            for lie in (
                "stale epoch",
                "other version",
                "over budget",
                "gap",
                "not a number",
                "another answer",
            )
        ),
        ("worker ready", "worker loading", "worker away", "worker unknown"),
    ),
    "changes hands": ("worker loading", "worker ready"),
    "old chunks again": (
        "worker ready",
        "worker loading",
        "worker away",
        "worker unknown",
        "worker draining",
    ),
    "request fails": ("worker ready", "worker away", "worker unknown"),
    "load fails": ("worker loading",),
    "daemon unreachable": ("worker unknown", "worker loading", "worker away"),
    "resumed from an older checkpoint": ("trainer open",),
    "an older attempt speaks": ("trainer publish", "trainer submit", "trainer commit"),
    "run closed": ("trainer collect", "trainer publish", "trainer submit"),
    "lost": (
        "WorkerHello",
        "Welcome",
        "Heartbeat",
        "HeartbeatAck",
        "Chunks",
        "Ack",
        "Assign",
        "Revoke",
        "UseWeights",
        "WeightsLoaded",
        "Goodbye",
        "GoodbyeAck",
        "HelloAgain",
        "Drain",
        "Sleep",
        "Wake",
        "Rejected",
        "OpenRun",
        "RunOpened",
        "Attach",
        "PublishVersion",
        "Accepted",
        "SetReserved",
        "GroupDone",
        "Ok",
        "Ping",
        "Pong",
        "Fleet",
    ),
    "doubled": (
        "WorkerHello",
        "Welcome",
        "Heartbeat",
        "HeartbeatAck",
        "Chunks",
        "Ack",
        "Assign",
        "Revoke",
        "UseWeights",
        "Goodbye",
        "HelloAgain",
        "Rejected",
        "Accepted",
        "SetReserved",
        "GroupDone",
        "Ok",
        "Ping",
        "Pong",
        "Fleet",
    ),
    "late": (
        "WorkerHello",
        "Chunks",
        "Heartbeat",
        "Goodbye",
        "Attach",
        "PublishVersion",
        "SetReserved",
        "Ping",
    ),
}

#: Met five times or less in 2,000 schedules: counted and printed, but any change of the core may move them out of these.
RARE = frozenset(
    {
        ("goes on", "worker draining"),
        ("goes on", "worker asleep"),
        ("given back", "worker draining"),
        ("scheduler: FAILED", "worker draining"),
        ("scheduler: REQUEUED", "worker draining"),
        ("lost", "WeightsLoaded"),
        ("lost", "RunOpened"),
        ("doubled", "Accepted"),
        ("doubled", "GroupDone"),
        ("doubled", "Ping"),
    }
)
_MESSAGES = (*FAULTS["lost"], "CloseRun", "Denied", "RecordCheckpoint", "SampleFailed", "WeightsFailed")
_FAMILIES = (_ENGINES, (*_SAMPLES, _ENDED), (*_TRAINERS, "trainer over"), _MESSAGES)
_SELDOM = "met only while an order or an answer is under way: in some thousands of schedules, or in none"
#: Why the other states of a fault are not demanded. Which these are is computed: every state of the fault's family.
EXCUSED: dict[str, str] = {
    **dict.fromkeys(
        (kind for kind in FAULTS if kind.startswith(("scheduler", "given back"))),
        "only reserved engines sleep: no job",
    ),
    **dict.fromkeys(
        (kind for kind in FAULTS if kind.startswith(("lies", "request"))),
        f"it holds no request there; {_SELDOM}",
    ),
    **dict.fromkeys(
        ("trainer killed", "second trainer", "trainer connects again"), "nothing follows a run that is over"
    ),
    "changes hands": f"the daemon orders it of engines that load or generate; {_SELDOM}",
    "old chunks again": f"an engine that sleeps; {_SELDOM}",
    "load fails": f"a load is under way where the daemon waits for it; {_SELDOM}",
    "resumed from an older checkpoint": "counted where it happens: when a trainer begins",
    "an older attempt speaks": "it would only ping there",
    "run closed": f"closing is drawn seldom; {_SELDOM}",
    **dict.fromkeys(
        (kind for kind in FAULTS if kind.startswith(("clock of", "commit", "daemon"))),
        "ended samples are forgotten at once",
    ),
    "daemon unreachable": f"it connects anew when it lost its connection; {_SELDOM}",
    "lost": _SELDOM,
    "doubled": f"Attach: said once over each connection, and none doubles what it carries; others: {_SELDOM}",
    "late": f"only what a peer says comes late, over a connection that it gave up; {_SELDOM}",
}


def excused() -> dict[str, tuple[str, ...]]:
    """Which states of each fault's family are not demanded."""
    rest = {
        kind: tuple(s for f in _FAMILIES if states[0] in f for s in f if s not in states)
        for kind, states in FAULTS.items()
    }
    return {kind: states for kind, states in rest.items() if states}


def tables() -> dict[str, set[tuple[str, str]]]:
    """What is legal."""
    return {
        "samples": {(status.value, step.value) for status, to in SAMPLE_TRANSITIONS.items() for step in to},
        "workers": {(status.value, step.value) for status, to in WORKER_TRANSITIONS.items() for step in to},
        "events": {(a, b) for a, after in WITHIN_ONE_EVENT.items() for b in after},
        "phases": {(a.value, b.value) for a, after in PHASE_TRANSITIONS.items() for b in after},
    }


def illegal(cover: Coverage) -> list[str]:
    """Steps that were taken and that no table has."""
    return [
        f"{name}: {a} -> {b}"
        for name, legal in tables().items()
        for a, b in sorted(getattr(cover, name))
        if (a, b) not in legal
    ]


def missing(cover: Coverage) -> list[str]:
    """Legal steps, and possible ones, that nothing took."""
    wanted = ((name, pair) for name, legal in tables().items() for pair in sorted(legal))
    return [f"{name}: {a} -> {b}" for name, (a, b) in wanted if not getattr(cover, name)[a, b]]


def faults_missing(cover: Coverage) -> list[str]:
    demanded = (
        (kind, state) for kind, states in FAULTS.items() for state in states if (kind, state) not in RARE
    )
    return [f"{kind} x {state}" for kind, state in demanded if not cover.faults[kind, state]]


class Coverage:
    """Counters that schedules add to."""

    def __init__(self) -> None:
        self.samples: Counter[tuple[str, str]] = Counter()
        self.workers: Counter[tuple[str, str]] = Counter()
        self.events: Counter[tuple[str, str]] = Counter()  # a worker's status before and after one event
        self.phases: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[tuple[str, str]] = Counter()
        self.blocks: Counter[str] = (
            Counter()
        )  # KV blocks that leases named: what they found, and why engines refused them
        self.siblings: Counter[str] = (
            Counter()
        )  # tokens told, drafted and accepted; messages that were forged, by kind
        self.fleet: Counter[str] = Counter()  # what befell links, guests and engines of another run (`fleet`)
        self.schedules = 0
        self.trained_beside = self.ended_late = (
            0  # ops at which a trainer trained beside sleepers; engines ended for their silence
        )
        self.handled = self.moments = self.set_aside = 0  # `set_aside`: engines, for their numbers

    def add(self, other: Coverage) -> None:
        for mine, theirs in zip(self.tables(), other.tables(), strict=True):
            mine.update(theirs)
        self.siblings.update(other.siblings)
        self.blocks.update(other.blocks)
        self.fleet.update(other.fleet)
        self.schedules += other.schedules
        self.trained_beside += other.trained_beside
        self.ended_late += other.ended_late
        self.set_aside += other.set_aside
        self.handled += other.handled

    def tables(self) -> tuple[Counter[tuple[str, str]], ...]:
        return self.samples, self.workers, self.events, self.phases, self.faults

    def summary(self, *, whole: bool = False) -> str:
        """Counts; `whole`: each pair with its own."""
        lines = [f"{self.schedules:,} schedules, {self.handled:,} events of the router's core"]
        for name, legal in tables().items():
            lines.append(f"{name}: {len(set(getattr(self, name)))} of {len(legal)} legal transitions taken")
        demanded = sum(len(states) for states in FAULTS.values()) - len(RARE)
        lines.append(
            f"faults: {len(self.faults)} pairs of fault and state, {demanded} demanded, missing {faults_missing(self)}"
        )
        lines.append(f"siblings' tokens: {dict(self.siblings)}")
        lines.append(f"KV blocks of leases: {dict(self.blocks)}")
        for kind in sorted({kind for kind, _ in self.faults}):
            met = [f"{state} {n:,}" for (name, state), n in sorted(self.faults.items()) if name == kind]
            lines.append(f"  {kind}: {', '.join(met)}")
        for kind, states in excused().items():
            never = [state for state in states if not self.faults[kind, state]]
            lines += [f"  never {kind} x {', '.join(never)}: {EXCUSED[kind]}"] if never else []
        if whole:
            for name, table in zip(
                ("samples", "workers", "events", "phases", "faults"), self.tables(), strict=True
            ):
                lines += [f"  {name:<8} {a} / {b}: {n:,}" for (a, b), n in sorted(table.items())]
        return "\n".join(lines)

    def fault(self, kind: str, state: str) -> None:
        self.faults[kind, state] += 1

    def phase(self, before: WorkerPhase, after: WorkerPhase) -> None:
        self.phases[before.value, after.value] += 1

    @staticmethod
    def workers_before(core: Core) -> dict[int, str]:
        return {i: w.status for i, w in core.workers.items()}

    def workers_after(self, core: Core, before: dict[int, str]) -> None:
        now = core.workers
        for i, worker in now.items():
            was = before.pop(i, "-")
            if was != worker.status:
                self.events[str(was), str(worker.status)] += 1
        for was in before.values():
            self.events[str(was), "-"] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts the steps of samples and workers."""
        of_samples, of_workers = Sample.transition, Worker.transition

        def sample_step(sample: Sample, step: SampleStep) -> None:
            before: SampleStatus = sample.status
            of_samples(sample, step)
            self.samples[before.value, step.value] += 1

        def worker_step(worker: Worker, step: WorkerStep) -> None:
            before: WorkerStatus = worker.status
            of_workers(worker, step)
            self.workers[before.value, step.value] += 1

        Sample.transition, Worker.transition = sample_step, worker_step  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Sample.transition, Worker.transition = of_samples, of_workers  # type: ignore[method-assign]


def main() -> None:
    from tests.router import schedule

    total = Coverage()
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2000):
        schedule.run(seed, 200, total)
    print(total.summary(whole=True))
    print("illegal:", illegal(total), "missing:", missing(total), faults_missing(total))


if __name__ == "__main__":
    main()
