"""A tracker that is shown views, for the tests of what observations mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scavenger.cluster.model import Job, JobFlag, JobState, Node
from scavenger.harvest.track.node_health import HealthRules
from scavenger.harvest.track.tracker import Output, Tracker, TrackerRules
from scavenger.ledger import records as rec
from tests.harvest.views import UID, USER, intended, ours, view

A, B = "scv-000000000000000a", "scv-000000000000000b"
RULES = TrackerRules(
    UID, USER, absent_s=30.0, health=HealthRules(quarantine_after=3, quarantine_s=600.0, backoff_s=5.0)
)
COMPLETING = frozenset({JobFlag.COMPLETING})


class Watch:
    """A tracker that is shown views; keeps everything that it said, and checks its tables after each."""

    def __init__(self, rules: TrackerRules = RULES) -> None:
        self.tracker = Tracker(rules)
        self.records: list[rec.Record] = []
        self.gone: list[tuple[str, int, bool]] = []

    def submit(self, intent_id: str, job_id: int, at: float = 0.0) -> None:
        self.tracker.intend(intended(intent_id, at), at)
        if job_id:
            self.keep(self.tracker.submitted(intent_id, job_id, at))

    def see(self, at: float, *jobs: Job, nodes: Sequence[Node] | None = None) -> Output:
        return self.keep(self.tracker.observe(view(at, jobs, nodes), at))

    def keep(self, output: Output) -> Output:
        self.tracker.check()
        self.records += output.records
        self.gone += [(event.intent_id, event.incarnation, event.crashed) for event in output.gone]
        return output

    def of(self, kind: type[rec.Record]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def ends(self) -> list[tuple[int, str]]:
        return [(record.restart_count, record.reason) for record in self.of(rec.AllocationEnded)]


def running(intent_id: str = A, job_id: int = 1, **more: Any) -> Job:
    return ours(intent_id, job_id, JobState.RUNNING, **more)


# ---------------------------------------------------------------- the tables
