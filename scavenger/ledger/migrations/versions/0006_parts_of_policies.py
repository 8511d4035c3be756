"""Several policies in one environment: what those whose part is over had of an episode's budget, and advantages of delivered turns."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006_parts_of_policies"
down_revision = "0005_turn_rewards"
branch_labels = None
depends_on = None

INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# As in 0002: cut to the second.
_UTC = {
    "sqlite": "CASE WHEN {at} >= 0 AND {at} < 253402300800 THEN strftime('%Y-%m-%d %H:%M:%S', CAST({at} AS integer), 'unixepoch') END",
    "postgresql": "CASE WHEN {at} >= 0 AND {at} < 253402300800"
    " THEN to_char(to_timestamp(floor({at})) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') END",
}
#: The columns of each view as it is, its times, and the columns that it gains.
VIEWS: dict[str, tuple[str, str, str]] = {
    "v_episodes": (
        "episode_id, run_id, name, state, reason, begun_at, ended_at, worker",
        "begun_at ended_at",
        "spent_turns, spent_tokens",
    ),
    "v_delivered_turns": ("group_id, run_id, delivery_id", "", "advantage"),
}


def upgrade() -> None:
    connection = op.get_bind()
    dialect = connection.dialect.name
    for column in ("spent_turns", "spent_tokens"):
        op.add_column("episodes", sa.Column(column, INT, nullable=False, server_default="0"))
    op.add_column("delivered_turns", sa.Column("advantage", sa.Double(), nullable=True))
    # PostgreSQL keeps who may read a view that is replaced, and takes new columns at its end alone.
    make = "CREATE VIEW" if dialect == "sqlite" else "CREATE OR REPLACE VIEW"
    for view, (columns, times, more) in VIEWS.items():
        if dialect == "sqlite":
            connection.exec_driver_sql(f"DROP VIEW {view}")
        shown = "".join(f", {_UTC[dialect].format(at=at)} AS {at}_utc" for at in times.split())
        table = view.removeprefix("v_")
        connection.exec_driver_sql(f"{make} {view} AS SELECT {columns}{shown}, {more} FROM {table}")
