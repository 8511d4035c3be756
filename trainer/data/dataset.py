"""Rows of a data set on disk: JSONL or Parquet, one file or a folder of them. Reads files; knows no order, tokenizer or reward.

A row is a prompt (text, or a conversation) and its metadata: every other column under its own name, and what a reward may verify against
under `answer`, where there is such a column.
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
    """`columns`: those beside the prompt, as the row has them. `row`: its place among all rows, from 0. `answer`: None = none."""

    prompt: Prompt
    columns: dict[str, Any]
    row: int
    answer: Any

    @property
    def meta(self) -> dict[str, Any]:
        """What the reward function gets: the row's place and its columns, of which one may be called `row`, and the answer."""
        return {"row": self.row} | self.columns | ({} if self.answer is None else {"answer": self.answer})


def read(data: DataSection, path: Path, key: str = "data") -> list[Item]:
    """The rows of `path`, files in the order of their names. `key`: where `path` stands in run.toml, such as "data.sets".

    Raises `ConfigError` naming file, row and column. Unless `data.answer_field` is set, rows may have no answer: all of them, or none.
    """
    items: list[Item] = []
    for number, (where, row) in enumerate(raw(data.task, path, key)):
        items.append(_item(row, data, where, number, key))
        if (items[-1].answer is None) != (items[0].answer is None):
            have, lack = ("it", "a row before it") if items[0].answer is None else ("a row before it", "it")
            raise ConfigError(
                f"{where}: {have} has {data.answer_field!r} and {lack} has none",
                "give every row an answer, or none, or name the column that every row has in data.answer_field",
            )
    if not items:
        raise ConfigError(f"{path} holds no prompt", f"each row has a column {data.prompt_field!r}")
    return items


def raw(task: str, path: Path, key: str = "data") -> Iterator[tuple[str, Any]]:
    """Every row as it stands in the files, with the place that errors name. Raises `ConfigError`."""
    for file in _files(path, SUFFIX[task], key):
        yield from _jsonl(file, key) if task == "jsonl" else _parquet(file, key)


def _files(path: Path, suffix: str, key: str) -> list[Path]:
    if not path.is_dir() and "*" not in path.name:
        return [path]
    found = sorted(path.rglob(f"*{suffix}") if path.is_dir() else path.parent.glob(path.name))
    if not found:
        raise ConfigError(
            f"{key}.path: {path} holds no *{suffix}",
            f'set {key}.task to "jsonl" or "parquet", as the files are',
        )
    return found


def _jsonl(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        # A line ends with a line feed alone: U+2028 and others that str.splitlines knows may stand in a JSON text as they are.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}.path: {path}: {error}", "give a JSONL file in UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}", "each line is one object") from error


def _parquet(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet files need pyarrow", "install it: pip install 'scavenger[parquet]'"
        ) from error
    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{key}.path: {path}: {error}", "give a Parquet file") from error
    for number, row in enumerate(table.to_pylist()):
        yield f"{path}, row {number}", row


def _item(row: Any, data: DataSection, where: str, number: int, key: str) -> Item:
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where}: {type(row).__name__} where an object is wanted",
            "each row is an object with named fields",
        )
    wanted = {"prompt_field": data.prompt_field} | (
        {"answer_field": data.answer_field} if "answer_field" in data.model_fields_set else {}
    )
    for column, field in wanted.items():
        if row.get(field) is None:
            there = ", ".join(repr(name) for name, value in row.items() if value is not None)
            raise ConfigError(
                f"{where}: no {field!r}; there is {there or 'no other column'}",
                f"set {key}.{column} to the column's name"
                + (", or leave it out if rows have no answer" if column == "answer_field" else ""),
            )
    _check_json(row, where)
    columns = {name: value for name, value in row.items() if name != data.prompt_field}
    prompt = _prompt(row[data.prompt_field], data.prompt_field, where)
    return Item(prompt, columns, number, row.get(data.answer_field))


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
