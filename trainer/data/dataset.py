"""Rows of a data set on disk: JSONL or Parquet, one file or a folder of them. Reads files; knows no order, tokenizer or reward.

A row is a prompt (text, or a conversation) and its metadata: every other column, with what the reward verifies against under `answer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scavenger.config import DataSection
from scavenger.errors import ConfigError

SUFFIX = {"jsonl": ".jsonl", "parquet": ".parquet"}
Prompt = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Item:
    prompt: Prompt
    meta: dict[str, Any]


def read(data: DataSection, path: Path) -> list[Item]:
    """The rows of `path`, files in the order of their names. Raises `ConfigError` naming file, row and column."""
    items = [_item(row, data, where, number) for number, (where, row) in enumerate(raw(data.task, path))]
    if not items:
        raise ConfigError(
            f"{path} holds no prompt", f"each row has `{data.prompt_field}` and `{data.answer_field}`"
        )
    return items


def raw(task: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Every row as it stands in the files, with the place that errors name. Raises `ConfigError`."""
    for file in _files(path, SUFFIX[task]):
        yield from _jsonl(file) if task == "jsonl" else _parquet(file)


def _files(path: Path, suffix: str) -> list[Path]:
    if not path.is_dir() and "*" not in path.name:
        return [path]
    found = sorted(path.rglob(f"*{suffix}") if path.is_dir() else path.parent.glob(path.name))
    if not found:
        raise ConfigError(
            f"data.path: {path} holds no *{suffix}", 'set data.task to "jsonl" or "parquet", as the files are'
        )
    return found


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        # A line ends with a line feed alone: U+2028 and others that str.splitlines knows may stand in a JSON text as they are.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.path: {path}: {error}", "give a JSONL file in UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}", "each line is one object") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet files need pyarrow", 'install it: pip install ".[parquet]" in a clone of Scavenger'
        ) from error
    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise ConfigError(f"data.path: {path}: {error}", "give a Parquet file") from error
    for number, row in enumerate(table.to_pylist()):
        yield f"{path}, row {number}", row


def _item(row: Any, data: DataSection, where: str, number: int) -> Item:
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where}: {type(row).__name__} where an object is wanted",
            "each row is an object with named fields",
        )
    for key, field in (("prompt_field", data.prompt_field), ("answer_field", data.answer_field)):
        if row.get(field) is None:
            raise ConfigError(
                f"{where}: no {field!r}; there is {', '.join(map(repr, row))}",
                f"set data.{key} to the column's name",
            )
    _check_json(row, where)
    meta = {name: value for name, value in row.items() if name not in (data.prompt_field, data.answer_field)}
    return Item(
        _prompt(row[data.prompt_field], data.prompt_field, where),
        meta | {"answer": row[data.answer_field], "row": number},
    )


def _check_json(row: dict[str, Any], where: str) -> None:
    """Prompt, answer and metadata travel as JSON: what cannot is told here, not when its step has come."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: {error}", "write the row in whole characters: half of a surrogate pair is none"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: {error}: metadata travels as JSON",
            "leave that column out of the file, or store it as text",
        ) from error


def _prompt(value: Any, field: str, where: str) -> Prompt:
    if isinstance(value, str):
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value)
    ):
        return value
    raise ConfigError(
        f"{where}: {field!r} is neither text nor a conversation",
        "a conversation is a list of objects with role and content",
    )
