"""CSV with named columns and comment lines, gzipped or not: rows that name their line when something is wrong with them.

Owns reading such a file. Knows nothing of what the columns mean. `rows` is pure; `read_csv` opens one file, whose path the user gave.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from scavenger.errors import ConfigError
from scavenger.parsing import whole

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CsvRow:
    """One line's cells by column. `line` counts from 1, comments included."""

    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        return self.cells[column]

    def whole(self, column: str, least: int | None = 0) -> int:
        """A whole number, at least `least` (None: any)."""
        text = self.cells[column].strip()
        size = whole(text[1:] if text.startswith(("+", "-")) else text)
        if size is None:
            raise self.wrong(f"no whole number of {column}")
        value = -size if text.startswith("-") else size
        if least is not None and value < least:
            raise self.wrong(f"{column} is below {least}")
        return value

    def number(self, column: str) -> float:
        """A finite number, at least 0."""
        try:
            value = float(self.cells[column])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise self.wrong(f"no finite number of {column}, 0 or above")
        return value

    def wrong(self, what: str) -> ConfigError:
        return ConfigError(
            f"line {self.line}: {what} in {','.join(self.cells.values())[:80]!r}",
            "correct or remove the line",
        )


def rows(lines: Iterable[str], columns: Sequence[str]) -> Iterator[CsvRow]:
    """The rows under a header that has at least `columns`. Lines that start with # and empty ones are skipped."""
    header: list[str] | None = None
    for number, line in enumerate(lines, 1):
        if line.startswith("#") or not line.strip():
            continue
        try:
            cells = next(csv.reader([line.rstrip("\r\n")]))
        except csv.Error as error:  # a cell of over 128 KiB
            raise ConfigError(
                f"line {number} is no CSV: {error}: {line[:80]!r}", "correct or remove the line"
            ) from error
        if header is None:
            header = cells
            missing = [column for column in columns if column not in header]
            if missing:
                raise ConfigError(
                    f"line {number}: no column {missing[0]} in the header {line.strip()[:80]!r}",
                    "name the columns there",
                )
            continue
        row = CsvRow(number, dict(zip(header, cells, strict=False)))
        if len(cells) != len(header):
            raise row.wrong(f"{len(cells)} columns instead of {len(header)}")
        yield row
    if header is None:
        raise ConfigError("the file is empty: it has not even a header", "check the path")


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """The lines. Raises `ConfigError` for a last one without its end: a file that was cut in it would be read as another number."""
    number, line = 0, "\n"
    for line in lines:
        number += 1
        yield line
    if not line.endswith("\n"):
        remedy = "the file is cut off; if it is whole, end its last line with a newline"
        raise ConfigError(f"line {number} has no end: {line[:80]!r}", remedy)


def read_csv(path: Path, parse: Callable[[Iterable[str]], T]) -> T:
    """`parse` over the lines of a file, gzipped when its name ends in .gz; its `ConfigError`s then name the file."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as file
        ):
            return parse(_whole(file))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.cause}", error.remedy) from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", "give a readable CSV file, gzipped if its name ends in .gz"
        ) from error
