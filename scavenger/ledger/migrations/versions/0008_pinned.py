"""A job's intent says which node it was submitted for, so that a daemon that starts again knows where a waiting job of ours will run.

On PostgreSQL the view gets its column at the end in place, so its grants stay. Going down makes it anew, without grants.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

#: The view's columns until now.
COLUMNS = (
    "intent_id, run_id, partition, gpus, intended_at, job_id, submitted_at, last_state, flags, reason, node, restart_count,"
    " observed_at, ended_at"
)


def upgrade() -> None:
    # plain ALTER TABLE: no row is touched; "" is also what older releases did not note
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("jobs")}
    if "pinned" not in columns:  # an older ledger that was restored over a newer one has kept it
        op.add_column("jobs", sa.Column("pinned", sa.Text(), nullable=False, server_default=sa.text("''")))
    in_place = op.get_bind().dialect.name == "postgresql"
    if not in_place:
        op.execute("DROP VIEW v_jobs")
    op.execute(f"CREATE {'OR REPLACE ' if in_place else ''}VIEW v_jobs AS SELECT {COLUMNS}, pinned FROM jobs")


def downgrade() -> None:
    op.execute("DROP VIEW v_jobs")
    op.drop_column("jobs", "pinned")
    op.execute(f"CREATE VIEW v_jobs AS SELECT {COLUMNS} FROM jobs")
