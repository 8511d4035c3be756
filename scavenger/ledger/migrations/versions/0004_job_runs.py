"""Engines that change hands: the runs that a job worked for before its present one, and allocations divided by them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004_job_runs"
down_revision = "0003_deliveries"
branch_labels = None
depends_on = None

INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# As in 0003: cut to the second.
_UTC = {
    "sqlite": "CASE WHEN {at} >= 0 AND {at} < 253402300800 THEN strftime('%Y-%m-%d %H:%M:%S', CAST({at} AS integer), 'unixepoch') END",
    "postgresql": "CASE WHEN {at} >= 0 AND {at} < 253402300800"
    " THEN to_char(to_timestamp(floor({at})) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') END",
}
# An allocation is one row for each run that it worked for. Its job's present run has what is after the last change of hands.
_PARTS = """
    SELECT h.intent_id, h.restart_count, h.job_id, h.node, h.gpus, p.run_id,
           CASE WHEN p.since_at > h.started_at THEN p.since_at ELSE h.started_at END AS started_at,
           CASE WHEN h.ended_at < p.until_at THEN h.ended_at ELSE p.until_at END AS ended_at,
           CASE WHEN h.ended_at <= p.until_at THEN h.reason ELSE 'handed over' END AS reason,
           p.since_at, p.until_at
    FROM gpu_allocations h
    JOIN job_runs p ON p.intent_id = h.intent_id AND p.until_at > h.started_at
         AND (h.ended_at IS NULL OR h.ended_at > p.since_at)
    UNION ALL
    SELECT h.intent_id, h.restart_count, h.job_id, h.node, h.gpus, COALESCE(j.run_id, 0) AS run_id,
           CASE WHEN c.at > h.started_at THEN c.at ELSE h.started_at END AS started_at, h.ended_at, h.reason,
           COALESCE(c.at, 0.0) AS since_at, CAST(NULL AS double precision) AS until_at
    FROM gpu_allocations h
    LEFT JOIN jobs j ON j.intent_id = h.intent_id
    LEFT JOIN (SELECT intent_id, max(until_at) AS at FROM job_runs GROUP BY intent_id) c ON c.intent_id = h.intent_id
    WHERE c.at IS NULL OR h.ended_at IS NULL OR h.ended_at > c.at
"""


def _column(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    op.create_table(
        "job_runs",
        sa.Column("id", INT, primary_key=True, autoincrement=True),
        _column("intent_id", sa.Text()),
        _column("run_id", INT),
        _column("since_at", sa.Double()),
        _column("until_at", sa.Double()),
    )
    op.create_index("ix_job_runs_intent", "job_runs", ["intent_id"])
    for view, columns, source, times in (
        ("v_job_runs", "id, intent_id, run_id, since_at, until_at", "job_runs", "since_at until_at"),
        (
            "v_allocation_runs",
            "intent_id, restart_count, job_id, node, gpus, run_id, started_at, ended_at, reason, since_at, until_at",
            f"({_PARTS}) parts",
            "started_at ended_at",
        ),
    ):
        shown = "".join(f", {_UTC[dialect].format(at=at)} AS {at}_utc" for at in times.split())
        # As it is: its colons and percent signs name no parameter.
        op.get_bind().exec_driver_sql(f"CREATE VIEW {view} AS SELECT {columns}{shown} FROM {source}")
