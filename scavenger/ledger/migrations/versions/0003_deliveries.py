"""Several policies in one environment: what one run's episodes say goes to the trainer of another run, each turn once."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003_deliveries"
down_revision = "0002_waits_costs_nodes"
branch_labels = None
depends_on = None

INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TYPES: dict[str, Any] = {"int": INT, "text": sa.Text(), "time": sa.Double(), "bytes": sa.LargeBinary()}

# As in 0001 and 0002: "?" after a type allows null; the keys are the core's.
KEYED: dict[str, tuple[str, tuple[str, ...]]] = {
    "deliveries": (
        "delivery_id",
        (
            "int run_id source_run_id episode_id group_delivery_id step prompt_index episode_index",
            "time reward",
            "int version",
            "bytes episode_rows",
            "text state reason",
            "int ended_step ended_attempt",
            "time? advantage",
            "time delivered_at",
            "time? ended_at",
        ),
    ),
    "delivered_turns": ("group_id", ("int run_id delivery_id",)),
}
INDEXES: dict[str, tuple[str, str]] = {
    "ix_deliveries_run": ("deliveries", "run_id state"),
    "ix_deliveries_episode": ("deliveries", "episode_id"),
    "ix_delivered_turns_delivery": ("delivered_turns", "delivery_id"),
}
VIEWS: dict[str, tuple[str, str, str]] = {
    "v_deliveries": (
        "delivery_id, run_id, source_run_id, episode_id, group_delivery_id, step, prompt_index, episode_index, reward, version,"
        " length(episode_rows) AS row_bytes, state, reason, ended_step, ended_attempt, advantage, delivered_at, ended_at",
        "deliveries",
        "delivered_at ended_at",
    ),
    "v_delivered_turns": ("group_id, run_id, delivery_id", "delivered_turns", ""),
}

# Both cut to the second, as in 0002.
_UTC = {
    "sqlite": "CASE WHEN {at} >= 0 AND {at} < 253402300800 THEN strftime('%Y-%m-%d %H:%M:%S', CAST({at} AS integer), 'unixepoch') END",
    "postgresql": "CASE WHEN {at} >= 0 AND {at} < 253402300800"
    " THEN to_char(to_timestamp(floor({at})) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') END",
}


def _columns(line: str) -> list[sa.Column[Any]]:
    kind, *names = line.split()
    return [sa.Column(name, _TYPES[kind.rstrip("?")], nullable=kind.endswith("?")) for name in names]


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    for table, (key, lines) in KEYED.items():
        named = sa.Column(key, INT, primary_key=True, autoincrement=False)
        op.create_table(table, named, *(column for line in lines for column in _columns(line)))
    for index, (table, names) in INDEXES.items():
        op.create_index(index, table, names.split())
    for view, (columns, table, times) in VIEWS.items():
        shown = "".join(f", {_UTC[dialect].format(at=at)} AS {at}_utc" for at in times.split())
        # As it is: its colons and percent signs name no parameter.
        op.get_bind().exec_driver_sql(f"CREATE VIEW {view} AS SELECT {columns}{shown} FROM {table}")
