"""A log for the moves of many samples at once, and no index of leases by worker.

A lost fleet's samples wait for their new leases to be durable. Logged, ten thousand moves are one row; what they change in `leases` and
`samples` follows within a second. The index cost each grant a tenth, and only reports over whole tables read it, which join without it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from scavenger.errors import LedgerError

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    # PostgreSQL's restore of a backup of before leaves tables that the backup does not have: what is in this one is of another history.
    op.execute("DROP TABLE IF EXISTS move_log")
    op.create_table(
        "move_log",
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        sa.Column("n", ID, nullable=False),
        sa.Column("moves", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
    )
    op.drop_index("ix_leases_worker", table_name="leases")


def downgrade() -> None:
    if op.get_bind().execute(sa.text("SELECT count(*) FROM move_log")).scalar():
        raise LedgerError(
            "moves wait in move_log that an older release cannot read", "start and stop this release's daemon once, then go down"
        )
    op.create_index("ix_leases_worker", "leases", ["worker_id"])
    op.drop_table("move_log")
