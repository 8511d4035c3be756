"""What docs/ names of the source must exist: `path.py:function`, `path.py`, and the messages of the wire."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scavenger.protocol import messages

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMED = re.compile(r"`((?:scavenger|rollout|trainer|tests|sql)/[\w./]+?)(?::(\w+))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_functions_that_a_page_names_exist(page: Path) -> None:
    wrong = []
    for path, name in NAMED.findall(page.read_text(encoding="utf-8")):
        if not (ROOT / path).exists():
            wrong.append(path)
        elif name and not re.search(
            rf"^\s*(?:async )?(?:def|class) {name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE
        ):
            wrong.append(f"{path}:{name}")
    assert not wrong, f"{page.name} names {wrong}"


def test_the_table_of_messages_is_the_wire_s() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text[text.index("## Wire protocol") : text.index("## Security")]
    told = set(re.findall(r"`([A-Z]\w+)`", table))
    # Another protocol's messages (the ranks of one engine, `rollout.node_link`) derive from the same base.
    ours = [cls for cls in messages.Message.__subclasses__() if cls.__module__.startswith(messages.__name__)]
    exist = {cls.__name__ for cls in ours}
    assert told == exist
