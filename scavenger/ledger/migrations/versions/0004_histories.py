"""Generations have a random uid and name the history that they belong to; rewards name the function that gave them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

#: Plain ALTER TABLE: no row is touched, however many samples there are. "" stands for what older releases did not note.
COLUMNS = {"generations": ("uid", "timeline"), "samples": ("reward_version",), "sample_ends": ("reward_version",)}


def upgrade() -> None:
    for table, names in COLUMNS.items():
        for name in names:
            op.add_column(table, sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    for table, names in COLUMNS.items():
        for name in names:
            op.drop_column(table, name)
