"""docs/client.md says what a trainer calls and gets, as the code's docstrings say it."""

from __future__ import annotations

import runpy

from scavenger import client
from scavenger.resources import path


def test_the_page_is_what_is_made_from_the_docstrings() -> None:
    made = runpy.run_path(str(path("scripts/client_page.py")))["page"]()
    assert path("docs/client.md").read_text(encoding="utf-8") == made, (
        "python scripts/client_page.py > docs/client.md"
    )


def test_every_public_method_of_a_run_says_what_it_does() -> None:
    page = path("docs/client.md").read_text(encoding="utf-8")
    public = {
        name for name, value in vars(client.Run).items() if callable(value) and not name.startswith("_")
    }
    missing = {name for name in public if f"### `{name}`" not in page}
    assert missing == {"opened"}, "which is the client's own"
