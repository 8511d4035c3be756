"""What the daemon did since it started, counted from the records that it hands to its ledger. Pure: records in, numbers out.

Owns the counters and nothing else: whatever is counted here is a row of the ledger too, so a graph and an SQL report cannot disagree for
long. `TallyingWriter` stands before the ledger's writer and lets every record pass through. Knows no router, no clock and no Prometheus.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from scavenger.ledger import records as rec
from scavenger.ledger.records import Record


class Writes(Protocol):
    """What `TallyingWriter` passes on to."""

    @property
    def backlog_bytes(self) -> int: ...

    def submit(self, ticket: int, records: Sequence[Record]) -> None: ...

    def go(self) -> None: ...


class Tally:
    """Counters by what they count; the labels stand in the keys."""

    def __init__(self) -> None:
        self.tokens: Counter[tuple[str, str]] = Counter()  # (run, kind of worker)
        self.salvaged: Counter[str] = Counter()  # run -> tokens that a lost engine's samples kept
        self.regenerated: Counter[str] = Counter()  # run -> tokens that are generated again
        self.engines_lost: Counter[tuple[str, str]] = Counter()  # (run, "yes" | "no": with notice)
        self.allocations_ended: Counter[str] = Counter()  # reason -> times that a harvested GPU was given up
        self.jobs_submitted = 0
        self.jobs_ended: Counter[str] = Counter()  # state
        self.samples_ended: Counter[str] = Counter()  # state
        self.decisions: Counter[tuple[str, str]] = Counter()  # (action, cluster)
        self.events: Counter[str] = Counter()  # kind
        self.steps: Counter[str] = Counter()  # run -> train steps committed
        self.step_seconds: dict[
            str, dict[str, float]
        ] = {}  # run -> seconds of its steps, summed, by what they went to
        self.last_step_seconds: dict[str, dict[str, float]] = {}
        self.step_committed_at: dict[str, float] = {}
        self.gpus: dict[str, rec.ClusterPolled] = {}  # by cluster, the last observation
        self._runs: dict[int, str] = {}
        self._workers: dict[int, tuple[str, str]] = {}  # worker -> (run, kind)
        self._take: dict[type, Callable[[Any], None]] = {
            rec.RunCreated: self._run,
            rec.WorkerJoined: self._joined,
            rec.WorkerLeft: self._left,
            rec.ChunkAccepted: self._chunk,
            rec.AllocationEnded: self._allocation_ended,
            rec.JobSubmitted: self._submitted,
            rec.JobEnded: self._job_ended,
            rec.StepCommitted: self._step,
            rec.ClusterPolled: self._sampled,
            rec.Decision: self._decided,
            rec.Event: self._event,
            rec.SampleEnded: self._sample_ended,
        }

    def restore(self, snapshot: rec.Snapshot) -> None:
        """Names of the runs and workers that the ledger has: nothing of the past is counted."""
        for run in snapshot.runs:
            self._runs[run.created.run_id] = run.created.name
        for worker in snapshot.workers:
            self._joined(worker.joined)

    def add(self, records: Iterable[Record]) -> None:
        take = self._take
        for record in records:
            handler = take.get(type(record))
            if handler is not None:
                handler(record)

    def _run(self, record: rec.RunCreated) -> None:
        self._runs[record.run_id] = record.name

    def _name(self, run_id: int) -> str:
        return self._runs.get(run_id, "")

    def _joined(self, record: rec.WorkerJoined) -> None:
        self._workers[record.worker_id] = (self._name(record.run_id), record.kind)

    def _left(self, record: rec.WorkerLeft) -> None:
        run, _ = self._workers.pop(record.worker_id, ("", ""))
        self.salvaged[run] += record.salvaged
        self.regenerated[run] += record.regenerated
        self.engines_lost[run, "yes" if record.notice else "no"] += 1

    def _chunk(self, record: rec.ChunkAccepted) -> None:
        self.tokens[self._workers.get(record.worker_id, ("", ""))] += len(record.tokens) // 4

    def _allocation_ended(self, record: rec.AllocationEnded) -> None:
        self.allocations_ended[record.reason] += 1

    def _submitted(self, record: rec.JobSubmitted) -> None:
        self.jobs_submitted += 1

    def _job_ended(self, record: rec.JobEnded) -> None:
        self.jobs_ended[record.state] += 1

    def _sample_ended(self, record: rec.SampleEnded) -> None:
        self.samples_ended[record.state] += 1

    def _step(self, record: rec.StepCommitted) -> None:
        if record.purpose != "train":
            return
        run = self._name(record.run_id)
        self.steps[run] += 1
        self.step_committed_at[run] = record.at
        last = self.last_step_seconds[run] = _seconds(record.metrics)
        total = self.step_seconds.setdefault(run, {})
        for what, seconds in last.items():
            total[what] = total.get(what, 0.0) + seconds

    def _sampled(self, record: rec.ClusterPolled) -> None:
        self.gpus[record.cluster] = record

    def _decided(self, record: rec.Decision) -> None:
        self.decisions[record.action, record.cluster] += 1

    def _event(self, record: rec.Event) -> None:
        self.events[record.kind] += 1


def _seconds(metrics: str) -> dict[str, float]:
    """A step's seconds as its trainer said them: "step" in all, and "wait", "train", "publish" of it. A foreign one may say none."""
    try:
        said = msgspec.json.decode(metrics, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
    names = {
        "seconds": "step",
        "seconds_wait": "wait",
        "seconds_train": "train",
        "seconds_publish": "publish",
    }
    return {label: float(said[key]) for key, label in names.items() if isinstance(said.get(key), int | float)}


class TallyingWriter:
    """A ledger writer as the server sees it, with a tally before it. `clock`: seconds, of whatever origin.

    It remembers when what may not be durable yet was submitted; `lag_s`, asked now and then, forgets what is.
    """

    def __init__(self, writer: Writes, tally: Tally, clock: Callable[[], float]) -> None:
        self._writer, self._tally, self._clock = writer, tally, clock
        self._submitted: deque[tuple[int, float]] = deque()  # (records, when)
        self._held = 0  # records in it

    @property
    def backlog_bytes(self) -> int:
        return self._writer.backlog_bytes

    def submit(self, ticket: int, records: Sequence[Record]) -> None:
        self._writer.submit(ticket, records)  # first: what is refused is not counted
        self._tally.add(records)
        self._submitted.append((len(records), self._clock()))
        self._held += len(records)

    def lag_s(self, backlog: int) -> float:
        """Age of the oldest record that is not durable; `backlog`: how many are not, the newest ones, for commits come in order."""
        while self._submitted and self._held - self._submitted[0][0] >= backlog:
            self._held -= self._submitted.popleft()[0]
        return max(0.0, self._clock() - self._submitted[0][1]) if self._submitted and backlog else 0.0

    def go(self) -> None:
        self._writer.go()
