"""Alembic's entry: run the revisions on the connection that `store` put into the configuration's attributes.

Knows no URL. All revisions of one upgrade share a transaction, on SQLite too: an upgrade that fails changes nothing.
"""

from __future__ import annotations

from alembic import context

from scavenger.ledger.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    # SQLite cannot ALTER most things in place; batch mode copies the table instead.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
