"""Decisions carry their reason in a word, and checkpoints say which of them their trainer keeps.

On PostgreSQL the two views get their column at the end in place, so their grants stay. Going down makes them anew, without grants.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

#: Plain ALTER TABLE: no row is touched. "" stands for what older releases did not note.
COLUMNS = {"decisions": "code", "checkpoints": "kept"}
#: View: (its columns until now, the new one), of the table that is called as the view.
VIEWS = {
    "v_decisions": ("id, policy, action, subject, reason, inputs, at", "code"),
    "v_checkpoints": ("id, run_id, step, version, root, path, recorded_at, rewound_by", "kept"),
}


def upgrade() -> None:
    for table, name in COLUMNS.items():
        op.add_column(table, sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''")))
    in_place = op.get_bind().dialect.name == "postgresql"
    for view, (columns, added) in VIEWS.items():
        if not in_place:
            op.execute(f"DROP VIEW {view}")
        op.execute(f"CREATE {'OR REPLACE ' if in_place else ''}VIEW {view} AS SELECT {columns}, {added} FROM {view.removeprefix('v_')}")


def downgrade() -> None:
    for view in VIEWS:
        op.execute(f"DROP VIEW {view}")
    for table, name in COLUMNS.items():
        op.drop_column(table, name)
    for view, (columns, _) in VIEWS.items():
        op.execute(f"CREATE VIEW {view} AS SELECT {columns} FROM {view.removeprefix('v_')}")
