"""Options that several commands of `scavenger` share. It knows no command."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from scavenger.config import layers

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="the daemon's scavenger.toml", envvar="SCAVENGER_CONFIG")
]
DEFAULT_CONFIG = Path("scavenger.toml")
#: Values that an option refuses all others of, and that Tab offers.
EngineName = Literal["vllm", "reference"]
PolicyName = Literal["predictive", "standard"]
TextOrJson = Literal["text", "json"]
OverOption = Annotated[
    list[Path] | None,
    typer.Option("--over", metavar="FILE", help="another TOML file, laid over it; repeatable"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="a key laid over all files: section.key=value; repeatable"
    ),
]


def number(name: str, meaning: str, least: float | None = None) -> Any:
    """An option that takes a finite number: click's own limits let NaN through, and figures made of it mean nothing."""
    return typer.Option(name, callback=_finite, min=least, help=meaning)


def removed(name: str, remedy: str) -> Any:
    """An option that an earlier release had, kept for one minor release: hidden, and an error that says `remedy`."""

    def refuse(value: str | None) -> None:
        if value is not None:
            raise typer.BadParameter(f"{name} is gone: {remedy}")

    return typer.Option(name, callback=refuse, hidden=True)


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def is_readable(config: Path) -> bool:
    """Whether all files that `config` names, which may be several, are there, and this user may read them."""
    return all(os.access(one, os.R_OK) for one in layers.files_of(config))
