"""Options that several commands of `scavenger` share. It knows no command."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="the daemon's scavenger.toml", envvar="SCAVENGER_CONFIG")
]
DEFAULT_CONFIG = Path("scavenger.toml")


def number(name: str, meaning: str, least: float | None = None) -> Any:
    """An option that takes a finite number: click's own limits let NaN through, and figures made of it mean nothing."""
    return typer.Option(name, callback=_finite, min=least, help=meaning)


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
