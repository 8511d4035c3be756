"""What retention made of a sample's chunks, and when a run's contents were purged. All are null in a ledger that kept everything.

Going down forgets it: what was dropped or purged stays so, and an older release's check calls those tokens missing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("samples", sa.Column("contents", sa.Text(), nullable=True))
    op.add_column("groups", sa.Column("purged_prompt_tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True))
    op.add_column("runs", sa.Column("purged_at", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "purged_at")
    op.drop_column("groups", "purged_prompt_tokens")
    op.drop_column("samples", "contents")
