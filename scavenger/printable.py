"""Text on its way to a terminal: that of others, which may be hostile, and counts in words. Pure.

Engines and owners of runs choose reasons, names and prompts; what they choose must not drive the terminal of whoever reads it: clear it,
set its title, turn the reading order.
"""

from __future__ import annotations

import json
import re

#: C0 and C1 controls but tab and newline, line separators, and the controls of the reading order.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with each control character replaced by U+FFFD; tabs and newlines stay."""
    return _CONTROLS.sub("\ufffd", text)


def amount(n: int, what: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def indented(json_text: str, most: int) -> str:
    """The beginning of JSON with one value a line, of `most` characters or a few more; of what is no JSON as it is.

    No more is made than is returned: what is deep and wide takes a thousand times its own characters.
    """
    try:
        parts = json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(json.loads(json_text))
        made, left = list[str](), most
        for part in parts:
            made.append(part[: left + 1])
            left -= len(part)
            if left < 0:
                break
    except (ValueError, RecursionError):
        return json_text[: most + 1]
    return "".join(made)


def escaped(json_text: str) -> str:
    """JSON whose strings hold no control character either, and that says the same: control characters as JSON's escapes."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text)
