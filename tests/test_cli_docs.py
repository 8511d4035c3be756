"""docs/cli.md says what the commands take and what their exit codes mean, as the code has them."""

from __future__ import annotations

import re

from scavenger.cli import reference
from scavenger.protocol.worker import events
from scavenger.resources import path


def test_the_page_is_what_is_made_from_the_commands() -> None:
    assert path("docs/cli.md").read_text(encoding="utf-8") == reference.page(), (
        "python -m scavenger.cli.reference > docs/cli.md"
    )


def test_every_option_says_what_it_does() -> None:
    silent = [
        line for line in reference.page().splitlines() if re.fullmatch(r"\| `-.* \| [^|]* \|  \|", line)
    ]
    assert silent == []


def test_every_exit_code_of_a_worker_and_of_the_trainer_is_told() -> None:
    assert set(reference.WORKER) == {name for name in vars(events) if name.startswith("EXIT_")}
    head = path("trainer/__main__.py").read_text(encoding="utf-8").split('"""')[1]
    told = head[head.index("Exit codes:") : head.index("anything else")]
    assert {int(code) for code in re.findall(r"\b\d+\b", told)} == set(reference.TRAINER)


def test_a_page_names_no_home() -> None:
    assert "/root" not in reference.page()
    assert "/home" not in reference.page()
