"""Whole numbers in text that others wrote: plain ASCII digits, and not more of them than a number can have. Pure; knows no format.
And what decoders raise for what others wrote.

`str.isdigit` takes '²', which `int` refuses; `int` takes other scripts' digits and '1_000', and raises `ValueError` over 4,300 digits.
"""

from __future__ import annotations

import msgspec

#: What msgspec's decoders raise for bytes that are none of the type asked for: text need not be UTF-8, nor nesting bounded.
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
#: The largest 64-bit number: Slurm's own ids, counts and times have no more bits.
MOST = 2**64 - 1
_DIGITS = len(str(MOST))


def whole(text: str, most: int = MOST) -> int | None:
    """`text` as a whole number from 0 to `most`; None when it is none."""
    if len(text) > _DIGITS or not (text.isdigit() and text.isascii()):
        return None
    value = int(text)
    return value if value <= most else None
