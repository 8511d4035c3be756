"""Writes the small TOML documents that `scavenger init` and the demo make. The standard library only reads TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value))  # a basic string of TOML takes JSON's escapes
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    raise TypeError(f"{type(value).__name__} has no place in our TOML documents")


def dumps(document: Mapping[str, Mapping[str, Any]], why: Mapping[str, str] | None = None) -> str:
    """Sections of plain keys, in the order given. `why`: comments above keys, by `section.key`."""
    comments = {key: f"# {' '.join(text.split())}\n" for key, text in (why or {}).items()}
    sections = (
        f"[{name}]\n"
        + "".join(
            f"{comments.get(f'{name}.{key}', '')}{key} = {_value(value)}\n" for key, value in body.items()
        )
        for name, body in document.items()
    )
    return "\n".join(sections)
