"""Turns that an environment rewards by themselves: which part of the episode's reward each earned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_turn_rewards"
down_revision = "0004_job_runs"
branch_labels = None
depends_on = None

_COLUMNS = "group_id, episode_id, run_id, number, begun_at, parent_id, prefix_len, prompt_tokens"
# As in 0002: cut to the second.
_UTC = {
    "sqlite": "CASE WHEN {at} >= 0 AND {at} < 253402300800 THEN strftime('%Y-%m-%d %H:%M:%S', CAST({at} AS integer), 'unixepoch') END",
    "postgresql": "CASE WHEN {at} >= 0 AND {at} < 253402300800"
    " THEN to_char(to_timestamp(floor({at})) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') END",
}


def upgrade() -> None:
    connection = op.get_bind()
    dialect = connection.dialect.name
    op.add_column("turns", sa.Column("reward", sa.Double(), nullable=True))
    # PostgreSQL keeps who may read a view that is replaced, and takes new columns at its end alone.
    if dialect == "sqlite":
        connection.exec_driver_sql("DROP VIEW v_turns")
    make = "CREATE VIEW" if dialect == "sqlite" else "CREATE OR REPLACE VIEW"
    shown = f"{_UTC[dialect].format(at='begun_at')} AS begun_at_utc"
    connection.exec_driver_sql(f"{make} v_turns AS SELECT {_COLUMNS}, {shown}, reward FROM turns")
