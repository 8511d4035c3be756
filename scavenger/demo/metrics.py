"""The demo's numbers, read from the ledger by the queries under `sql/demo/`, as an admin would read them.

Owns the reading and the typed result. Knows neither the display nor the report.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import sqlalchemy as sa

from scavenger import resources


@dataclass(frozen=True, slots=True)
class Now:
    """One moment of the run."""

    samples_open: int
    samples_in_flight: int
    tokens_in_flight: int
    engines_harvested: int
    engines_reserved: int
    preemptions: int
    tokens_salvaged: int
    tokens_regenerated: int
    tokens_total: int


@dataclass(frozen=True, slots=True)
class GpuCounts:
    at: float
    idle: int
    harvested: int
    other_users: int
    reserved: int
    unusable: int


@dataclass(frozen=True, slots=True)
class StepMetrics:
    purpose: str
    step: int
    metrics: dict[str, float]
    at: float


@dataclass(frozen=True, slots=True)
class LostEngine:
    """An engine that went away, with what it had in flight."""

    at: float
    node: str
    job_id: int
    notice: bool
    reason: str
    samples: int
    salvaged: int
    regenerated: int


@dataclass(frozen=True, slots=True)
class Moves:
    """Training samples: delivered, trained on, left out because all rewards of their group were equal; and those that moved."""

    samples: int
    trained: int
    filtered: int
    moved: int
    most: int

    @property
    def share(self) -> float:
        return self.moved / self.samples if self.samples else 0.0


@dataclass(frozen=True, slots=True)
class DemoMetrics:
    now: Now
    gpus: tuple[GpuCounts, ...]
    steps: tuple[StepMetrics, ...]
    lost: tuple[LostEngine, ...]
    moves: Moves

    def evaluations(self) -> list[StepMetrics]:
        return [s for s in self.steps if s.purpose == "eval"]

    def trained(self) -> list[StepMetrics]:
        return [s for s in self.steps if s.purpose == "train"]


def read(engine: sa.Engine) -> DemoMetrics:
    """Read everything in one short transaction."""
    with engine.connect() as connection:

        def rows(name: str) -> list[tuple[object, ...]]:
            return [tuple(row) for row in connection.execute(sa.text(resources.text(f"sql/demo/{name}.sql")))]

        now = Now(*rows("now")[0])  # type: ignore[arg-type]
        gpus = tuple(GpuCounts(*row) for row in rows("gpus"))  # type: ignore[arg-type]
        steps = tuple(
            StepMetrics(str(p), int(str(s)), json.loads(str(m)), float(str(at)))
            for p, s, m, at in rows("steps")
        )
        lost = tuple(LostEngine(*row) for row in rows("preemptions"))  # type: ignore[arg-type]
        moves = Moves(*rows("moves")[0])  # type: ignore[arg-type]
    return DemoMetrics(now, gpus, steps, lost, moves)


def run_state(engine: sa.Engine) -> str:
    """active | finished | failed | stopped, of the newest run; "" before there is one."""
    with engine.connect() as connection:
        row = connection.execute(sa.text(resources.text("sql/demo/run.sql"))).first()
    return "" if row is None else str(row[0])
