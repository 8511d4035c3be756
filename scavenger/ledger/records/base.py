"""What every record is. Pure."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Base of all records; the tag is the class name."""
