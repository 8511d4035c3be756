"""The `scavenger config` commands: what a daemon or a run would use, key by key, and where each value came from.

Owns the text. Reads files alone: neither Slurm, a ledger nor a model.

Boundary: one subcommand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from scavenger import config as configs
from scavenger.cli.options import DEFAULT_CONFIG, OverOption, SetOption
from scavenger.config import DaemonConfig, RunConfig
from scavenger.config.layers import Layered, files_of, read
from scavenger.printable import printable

app = typer.Typer(no_args_is_help=True, help="What the configuration says.")
#: The origin of a key that nobody set.
DEFAULT = "default"
HIDDEN = "(not shown: it may hold a password)"


class Kind(StrEnum):
    AUTO = "auto"
    RUN = "run"
    DAEMON = "daemon"


@app.callback()
def _group() -> None:
    """A group, though it has one command yet."""


@app.command("show")
def show(
    file: Annotated[
        Path,
        typer.Argument(
            help="scavenger.toml or run.toml; several with ':' between", envvar="SCAVENGER_CONFIG"
        ),
    ] = DEFAULT_CONFIG,
    over: OverOption = None,
    sets: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="say where each value came from")] = False,
    given: Annotated[bool, typer.Option("--given", help="only keys that are not defaults")] = False,
    kind: Annotated[Kind, typer.Option(help="whose file it is; auto: by its sections")] = Kind.AUTO,
) -> None:
    """Print every key with its value, as TOML: defaults, files laid over each other, keys of the command line."""
    for line in shown(file, over or (), sets or (), origin=origin, given=given, kind=kind):
        print(printable(line))


def shown(
    file: Path,
    over: list[Path] | tuple[Path, ...],
    sets: list[str] | tuple[str, ...],
    *,
    origin: bool,
    given: bool,
    kind: Kind = Kind.AUTO,
) -> Iterator[str]:
    """The lines. Raises `ConfigError` as the daemon or the run would."""
    if kind is Kind.AUTO:
        there = {name for path in files_of(file, tuple(over)) for name in read(path)}
        kind = (
            Kind.RUN
            if there & (RunConfig.model_fields.keys() - DaemonConfig.model_fields.keys())
            else Kind.DAEMON
        )
    model: type[RunConfig] | type[DaemonConfig] = RunConfig if kind is Kind.RUN else DaemonConfig
    layered = configs.laid_over(model, file, over, sets)
    whole: BaseModel = configs.run_of(layered) if model is RunConfig else configs.daemon_of(layered)
    dumped, first = whole.model_dump(mode="json"), True
    for section, body in dumped.items():
        rows = [
            (key, _value(f"{section}.{key}", value), _origin(layered, section, key))
            for key, value in body.items()
        ]
        rows = [row for row in rows if not given or row[2] != DEFAULT]
        if not rows:
            continue
        yield from ([] if first else [""]) + [f"[{section}]"]
        first = False
        texts = [f"{key} = {value}" if value else f"#{key} = (none)" for key, value, _ in rows]
        pad = min(48, max(map(len, texts))) if origin else 0
        for text, (_, _, where) in zip(texts, rows, strict=True):
            yield f"{text:<{pad}}  # {where}" if origin else text


def _origin(layered: Layered, section: str, key: str) -> str:
    return layered.origins.get(f"{section}.{key}", DEFAULT)


def _value(name: str, value: Any) -> str:
    """As TOML; "" for none, which TOML cannot say."""
    if name in configs.SECRETS and value and not str(value).startswith("sqlite:"):
        return json.dumps(HIDDEN)
    return "" if value is None else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items() if one is not None]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(one) for one in value)}]"
    return json.dumps(value, ensure_ascii=False)
