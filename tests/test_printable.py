"""Text of others that is printed: its control characters do nothing to a terminal."""

from __future__ import annotations

import json

import msgspec
import pytest

from scavenger.observe import status
from scavenger.printable import escaped, printable
from tests.observe.test_status import SEEN
from tests.router.harness import started


def test_controls_are_replaced_and_other_scripts_tabs_and_newlines_stay() -> None:
    assert printable("a\tb\n質問 \u200d\u00a0é") == "a\tb\n質問 \u200d\u00a0é"
    assert printable("\x1b[2J\r\x00\x7f\x9b\u2028\u202e\u2066") == "\ufffd[2J" + 7 * "\ufffd"


def test_json_with_escapes_says_the_same() -> None:
    said = {"x": "\x1b\x7f\x9b\u202e é\n"}
    text = escaped(json.dumps(said, ensure_ascii=False))
    assert text.isprintable()
    assert json.loads(text) == said


def test_the_status_prints_no_controls() -> None:
    seen = msgspec.structs.replace(SEEN, ledger_state="DISK_FULL", ledger_reason="full \x1b[2J")
    assert "\x1b" not in "\n".join(status.lines(seen, 1001.0))


@pytest.mark.parametrize("field", ["node", "engine", "session"])
def test_a_hello_with_control_characters_is_refused(field: str) -> None:
    bench = started()
    bench.hello(10, **{field: "n\x1b]0;x\x07"})  # type: ignore[arg-type]
    assert not bench.router.core.workers
