"""docs/schema.md says what each column of each table and view means, as the databases have them."""

from __future__ import annotations

import sqlalchemy as sa

from scavenger.ledger import reference, schema, store
from scavenger.resources import path
from tests.ledger.examples import everything, written


def test_the_page_is_what_is_made_from_the_tables() -> None:
    assert path("docs/schema.md").read_text(encoding="utf-8") == reference.page(), (
        "python -m scavenger.ledger.reference > docs/schema.md"
    )


def test_no_table_and_no_column_is_without_a_meaning() -> None:
    for table in schema.metadata.tables.values():
        assert table.info["row"], table.name
        for column in table.columns:
            assert column.doc, f"{table.name}.{column.name}"
            assert column.doc[0].isupper() or column.doc[0] == "`", f"{table.name}.{column.name}"
            assert column.doc.endswith("."), f"{table.name}.{column.name}"


def test_each_column_of_a_view_is_a_table_s_or_has_a_meaning_of_its_own(url: str) -> None:
    written(url, everything())
    engine = store.open_readonly(url)
    try:
        inspector = sa.inspect(engine)
        found = {
            view: {str(column["name"]) for column in inspector.get_columns(view)}
            for view in inspector.get_view_names()
        }
    finally:
        engine.dispose()
    here = set(reference.COMPUTED) - (set() if url.startswith("postgresql") else {"v_sample_tokens"})
    assert here <= set(found)
    for view, columns in found.items():
        table = schema.metadata.tables.get(view.removeprefix("v_"))
        known = {column.name for column in table.columns} if table is not None else set()
        own = set(reference.COMPUTED.get(view, ()))
        to_read = {name for name in columns - own if name.endswith("_utc")}
        assert columns - to_read - known == own, view
