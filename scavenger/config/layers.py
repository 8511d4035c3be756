"""Configuration from several places, laid over each other: TOML files, then keys of the command line. Where each value came from.

A later layer wins key by key; a list, and a table that a key holds (`reward.options`), are replaced whole by the layer that has them. A
relative path is relative to the file that says it, on the command line to the working directory. Owns that; knows no key by name but
those whose paths a file's place decides. Pure but for `read` and
the questions whether a file is there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel

from scavenger.config import unknown_keys
from scavenger.errors import ConfigError

#: The origin of keys that the command line sets.
COMMAND_LINE = "--set"
#: Several files in one argument or variable stand behind one another, as in PATH.
SEPARATOR = ":"
#: Where a site's package and pages have the daemon's configuration; it is read where it is named, never by itself.
SITE_CONFIG = Path("/etc/scavenger/scavenger.toml")

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layered:
    """The whole document, and by `section.key` the layer that its value is of. `first`: the first file."""

    first: Path
    document: Document
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, place: Sequence[str | int]) -> str:
        """The layer that a place of the document is of; of a section, the last one that has anything of it."""
        named = [str(part) for part in place[:2]]
        if (found := self.origins.get(".".join(named))) is not None:
            return found
        of_section = (
            [layer for key, layer in self.origins.items() if key.partition(".")[0] == named[0]]
            if named
            else []
        )
        return of_section[-1] if of_section else str(self.first)


def files_of(path: Path, over: Sequence[Path] = ()) -> tuple[Path, ...]:
    """The files that `path` names, which may be several with `:` between, and those laid over them."""
    several = SEPARATOR in str(path) and not _is_found(path)
    return (*(Path(part) for part in str(path).split(SEPARATOR) if part), *over) if several else (path, *over)


def is_there(path: Path) -> bool:
    """Whether there is such a file, or there may be one in a folder that this user may not enter: reading it says why."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _is_found(path: Path) -> bool:
    """Whether this user sees such a file. `Path.exists` raises for a folder that may not be entered."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def read(path: Path, *, of_run: bool = False) -> Document:
    """One file. `of_run`: a run's, which is named by an argument. Raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        if of_run:
            remedy = "name the run's file, as FOLDER/run.toml; `scavenger init FOLDER` with --model or --tiny writes one"
            raise ConfigError(f"{path}: {error.strerror}", remedy) from error
        remedy = "name it (--config, SCAVENGER_CONFIG); `scavenger init` writes one"
        if path.name == "scavenger.toml":  # who joined a site is not to make another one
            remedy += (
                f" for a daemon of your own, a site's is its admin's: {SITE_CONFIG}, as the daemon's user"
            )
        raise ConfigError(f"{path}: {error.strerror}", remedy) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def setting(model: type[BaseModel], text: str) -> tuple[str, str, list[str], Any]:
    """Of `section.key=value` or `section.table.key=value`: the section, the key, what follows in a table, and the value.

    The value is TOML; where it is not, or the key takes text alone, it is text as it stands. Raises `ConfigError`.
    """
    name, equals, raw = text.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        near = unknown_keys.hint(model, parts) if equals and parts[0] not in model.model_fields else ""
        raise ConfigError(
            f"{COMMAND_LINE} {text!r} sets no key{near and f': {near}'}",
            f"write {COMMAND_LINE} section.key=value, such as algorithm.name=gspo",
        )
    section, key, *inside = parts
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        value = raw
    kinds = _kinds(model, section, key)
    if not inside and kinds and kinds <= {str, Path, NoneType} and not isinstance(value, str):
        value = raw
    return section, key, inside, value


def lay(
    model: type[BaseModel], documents: Sequence[tuple[Path, Document]], sets: Sequence[str] = ()
) -> Layered:
    """The layers as one document. A single file stays as it is. Raises `ConfigError`."""
    first, whole = documents[0]
    alone = len(documents) == 1 and not sets
    if alone:
        return Layered(first, whole, dict.fromkeys(_keys(whole), str(first)))
    merged: Document = {}
    origins: dict[str, str] = {}
    for path, document in documents:
        _put(merged, _absolute(model, document, path.resolve().parent))
        origins |= dict.fromkeys(_keys(document), str(path))
    for text in sets:
        section, key, inside, value = setting(model, text)
        for part in reversed(inside):
            value = {part: value}
        one = _absolute(model, {section: {key: value}}, Path.cwd())
        held, layer = merged.get(section), COMMAND_LINE
        if inside and isinstance(held, dict) and isinstance(held.get(key), dict):
            one = {section: {key: _deep(held[key], one[section][key])}}
            below = origins.get(f"{section}.{key}", COMMAND_LINE)
            layer = below if below.endswith(COMMAND_LINE) else f"{below}, {COMMAND_LINE}"
        _put(merged, one)
        origins[f"{section}.{key}"] = layer
    return Layered(first, merged, origins)


def _keys(document: Document) -> list[str]:
    """`section.key` of all that a document says; a section's name alone where it is no table, or empty."""
    return [
        name
        for section, body in document.items()
        for name in ([f"{section}.{key}" for key in body] if isinstance(body, dict) and body else [section])
    ]


def _put(whole: Document, document: Document) -> None:
    for section, body in document.items():
        held = whole.get(section)
        whole[section] = held | body if isinstance(held, dict) and isinstance(body, dict) else body


def _deep(below: Any, above: Any) -> Any:
    """Tables merged key by key at every depth."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _deep(below.get(key), value) for key, value in above.items()}


def _absolute(model: type[BaseModel], document: Document, base: Path) -> Document:
    """The document with its paths made absolute, those that are relative to its file."""
    return {
        section: {key: _path(model, section, key, value, base) for key, value in body.items()}
        if isinstance(body, dict)
        else body
        for section, body in document.items()
    }


def _path(model: type[BaseModel], section: str, key: str, value: Any, base: Path) -> Any:
    relative: frozenset[str] | None = getattr(model, "FILE_RELATIVE", None)  # None: every path
    if relative is not None and f"{section}.{key}" not in relative:
        return value
    if Path in _kinds(model, section, key) and isinstance(value, str) and value:
        return str(base / value)
    if Path in _kinds(model, section, key) and isinstance(value, list):
        return [str(base / one) if isinstance(one, str) and one else one for one in value]
    if isinstance(value, list) and (inner := _table(model, section, key)) is not None:
        own = {name for name, one in inner.model_fields.items() if Path in _parts(one.annotation)}
        return [
            one | {name: str(base / one[name]) for name in own & one.keys() if isinstance(one[name], str)}
            if isinstance(one, dict)
            else one
            for one in value
        ]
    return value


def _annotation(model: type[BaseModel], section: str, key: str) -> Any:
    home = model.model_fields.get(section)
    inner = home.annotation if home is not None else None
    if not (isinstance(inner, type) and issubclass(inner, BaseModel)) or key not in inner.model_fields:
        return None
    return inner.model_fields[key].annotation


def _parts(annotation: Any) -> set[Any]:
    return set(get_args(annotation)) or {annotation}


def _kinds(model: type[BaseModel], section: str, key: str) -> set[Any]:
    """The types that a key takes; empty for one that does not exist."""
    annotation = _annotation(model, section, key)
    return set() if annotation is None else _parts(annotation)


def _table(model: type[BaseModel], section: str, key: str) -> type[BaseModel] | None:
    """Of a key that holds a list of tables: what such a table is."""
    found = (
        part for part in _kinds(model, section, key) if isinstance(part, type) and issubclass(part, BaseModel)
    )
    return next(found, None)
