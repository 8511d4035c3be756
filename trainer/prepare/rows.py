"""Which files, columns and kinds of answer a data set has. Looks at its first rows; knows no model.

Owns the names by which columns are recognised. What is not recognised is asked for, never guessed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scavenger.errors import ConfigError
from trainer.data import dataset
from trainer.episodes.wire import BUILT_IN

#: In the order of preference.
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages", "conversations")
ANSWERS = (
    "answer",
    "solution",
    "final_answer",
    "expected_answer",
    "ground_truth",
    "target",
    "label",
    "output",
    "response",
)
HELD_OUT = ("test", "validation", "valid", "eval", "dev")
ROWS_CHECKED = 200
#: Held-out prompts of a new run at most, and their share where they are taken out of the rows to train on.
EVALUATED, EVALUATED_SHARE = 256, 5
MATHEMATICS = re.compile(r"####|\\boxed|\\frac|\$|^\s*[-+]?[\d,]+(?:\.\d+)?(?:/\d+)?\s*%?\s*$")


@dataclass(frozen=True, slots=True)
class DataFacts:
    """`path` and `held_out`: what data.path and eval.path should say. `rows`: the first ones. `eval_prompts`: for eval.prompts.

    `answer_field`: "" where no column looks like answers: a judge or tests reward such completions. `environment`: whose tasks are the
    prompts, in place of files; `python`: the interpreter that has it, "" = the trainer's.
    """

    task: Literal["jsonl", "parquet"]
    path: str
    held_out: str
    prompt_field: str
    answer_field: str
    columns: tuple[str, ...]
    conversation: bool
    mathematics: bool
    rows: tuple[dict[str, Any], ...]
    eval_prompts: int
    environment: str = ""
    python: str = ""
    renderer: str = ""

    @property
    def is_built_in(self) -> bool:
        """Whether the environment is one of the package's own, which needs no `verifiers` and runs no programs."""
        return self.environment.startswith(BUILT_IN)


def of_environment(name: str, python: str, renderer: str = "") -> DataFacts:
    """A run's data where an environment of `verifiers` brings it. Nothing of it is known before it is loaded. `renderer`: of the run's
    model, where it is known.
    """
    return DataFacts("jsonl", "", "", "", "", (), True, False, (), 0, name, python, renderer)


def read_facts(path: Path, prompt_field: str = "", answer_field: str = "") -> DataFacts:
    """Raises `ConfigError` for files that are not there, cannot be read, or whose columns have no known names."""
    task = _task(path)
    train, held_out = _split(path, dataset.SUFFIX[task])
    many = [row for _, row in itertools.islice(dataset.raw(task, Path(train)), EVALUATED * EVALUATED_SHARE)]
    rows = many[:ROWS_CHECKED]
    if not rows:
        raise ConfigError(f"data.path: {train} holds no row", "each row has a prompt")
    if not all(isinstance(row, dict) for row in rows):
        raise ConfigError(
            f"data.path: {train}: a row is no object", "each row is an object with named fields"
        )
    columns = tuple(rows[0])
    prompt = _column(columns, prompt_field, PROMPTS, "prompt", train)
    if not prompt:
        raise ConfigError(
            f"{train}: which column is the prompt? There is {_listed(columns)}", "say it: --prompt-field NAME"
        )
    answer = _column([name for name in columns if name != prompt], answer_field, ANSWERS, "answer", train)
    answers = [str(row.get(answer)) for row in rows] if answer else []
    mathematics = 0.9 * len(rows) <= sum(bool(MATHEMATICS.search(text)) for text in answers)
    apart = sum(1 for _ in itertools.islice(dataset.raw(task, Path(held_out)), EVALUATED)) if held_out else 0
    eval_prompts = apart or min(max(1, len(many) // EVALUATED_SHARE), len(many) - 1)
    return DataFacts(
        task,
        train,
        held_out if apart else "",
        prompt,
        answer,
        columns,
        isinstance(rows[0].get(prompt), list),
        mathematics,
        tuple(rows),
        eval_prompts,
    )


def _task(path: Path) -> Literal["jsonl", "parquet"]:
    if path.is_dir():
        found = {suffix: len(list(path.rglob(f"*{suffix}"))) for suffix in dataset.SUFFIX.values()}
        if not any(found.values()):
            raise ConfigError(
                f"data.path: the folder {path} holds no *.jsonl and no *.parquet",
                "give a JSONL or Parquet file",
            )
        return "parquet" if found[".parquet"] > found[".jsonl"] else "jsonl"
    if "*" not in path.name and not path.is_file():
        raise ConfigError(
            f"data.path: there is no file {path}",
            "give a JSONL or Parquet file, a pattern, or a folder of them",
        )
    return "parquet" if path.suffix == ".parquet" else "jsonl"


def _split(path: Path, suffix: str) -> tuple[str, str]:
    """Training and held-out files: where a folder names both, as data sets of the Hugging Face hub do, each gets its pattern."""
    if not path.is_dir():
        return str(path), ""
    for file in sorted(path.rglob(f"train*{suffix}")):
        for word in HELD_OUT:
            if any(file.parent.glob(f"{word}*{suffix}")):
                return str(file.parent / f"train*{suffix}"), str(file.parent / f"{word}*{suffix}")
    return str(path), ""


def _column(columns: Sequence[str], asked: str, known: Sequence[str], what: str, path: str) -> str:
    """The one that was asked for, else the first of a known name; "" where there is none."""
    if asked and asked not in columns:
        raise ConfigError(
            f"{path} has no column {asked!r}; there is {_listed(columns)}", f"name another --{what}-field"
        )
    return asked or next((name for name in known if name in columns), "")


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in columns if name.strip()) or "no column with a name"
