"""Which problems a step trains on. Deterministic by seed and position, so a resumed run needs nothing but its step.

Owns order and tokenisation; knows no reward, model or socket. Position p of the training stream is the same problem in every
life of a run. A step takes the next n positions, or more where it replaces some; how many were taken is all that a resume needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from trainer.batching import shuffled
from trainer.tasks import sort


@dataclass(frozen=True, slots=True)
class Problem:
    """`index` is its position in the stream it was taken from; `meta` is what the reward verifies against."""

    index: int
    text: str
    tokens: tuple[int, ...]
    meta: dict[str, Any]


class Stream(Protocol):
    """An endless, seeded stream of training problems and a fixed set of held-out ones, as (text, meta)."""

    def train(self, position: int) -> tuple[str, dict[str, Any]]: ...

    def held_out(self, index: int) -> tuple[str, dict[str, Any]]: ...


class SortStream:
    """The built-in task: problems are made, not read."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def train(self, position: int) -> tuple[str, dict[str, Any]]:
        return sort.problem(self._seed, position)

    def held_out(self, index: int) -> tuple[str, dict[str, Any]]:
        return sort.problem(self._seed, index, held_out=True)


class _Line(msgspec.Struct):
    prompt: str
    answer: Any


class JsonlStream:
    """Rows of a JSONL file, reshuffled each epoch. `held_out` rows, chosen by the seed, are never trained on."""

    def __init__(self, path: Path, seed: int, held_out: int) -> None:
        self._rows = read_jsonl(path)
        order = shuffled(range(len(self._rows)), f"split/{seed}")
        if held_out >= len(order):
            raise ConfigError(f"{path} has {len(order)} rows, eval.problems = {held_out} leaves none to train on", "lower eval.problems")
        self._seed = seed
        self._held_out, self._train = order[:held_out], sorted(order[held_out:])
        self._epoch: tuple[int, Sequence[int]] = (-1, ())

    def train(self, position: int) -> tuple[str, dict[str, Any]]:
        epoch, place = divmod(position, len(self._train))
        if self._epoch[0] != epoch:
            self._epoch = (epoch, shuffled(self._train, f"epoch/{self._seed}/{epoch}"))
        return self._rows[self._epoch[1][place]]

    def held_out(self, index: int) -> tuple[str, dict[str, Any]]:
        return self._rows[self._held_out[index]]


def read_jsonl(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(prompt, everything else) of each line. Raises `ConfigError` with the line's number."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.path: {path}: {error}", "give a JSONL file in UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number}: {error}", "each line is an object with `prompt` (text) and `answer`") from error
        meta = json.loads(line)
        del meta["prompt"]
        rows.append((found.prompt, meta | {"row": number - 1}))
    if not rows:
        raise ConfigError(f"{path} holds no problem", "each line is an object with `prompt` (text) and `answer`")
    return rows


class Problems:
    """The run's problems, tokenised. Raises `ConfigError` for a prompt that leaves no room for an answer."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        data = config.data
        self._stream: Stream = SortStream(data.seed)
        if data.task == "jsonl" and data.path is not None:
            self._stream = JsonlStream(data.path, data.seed, config.eval.problems)
        self._tokenizer = tokenizer
        self._room = config.model.context_length - config.sampling.max_tokens
        self._per_step = data.prompts_per_step
        self._eval_count = config.eval.problems

    def of_step(self, step: int) -> list[Problem]:
        """The problems of step `step` (counted from 1)."""
        return self.take((step - 1) * self._per_step, self._per_step)

    def take(self, position: int, count: int) -> list[Problem]:
        """`count` problems of the training stream from `position` on."""
        return [self._problem(place, *self._stream.train(place)) for place in range(position, position + count)]

    def held_out(self) -> list[Problem]:
        return [self._problem(index, *self._stream.held_out(index)) for index in range(self._eval_count)]

    def _problem(self, index: int, text: str, meta: dict[str, Any]) -> Problem:
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if not 0 < len(tokens) <= self._room:
            raise ConfigError(
                f"problem {index} has {len(tokens)} prompt tokens, sampling.max_tokens leaves room for 1 to {self._room}: {text[:60]!r}",
                "raise model.context_length, lower sampling.max_tokens or leave the problem out",
            )
        return Problem(index, text, tokens, meta)


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises `ConfigError`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model.path: {folder} holds no tokenizer.json", "save the model's fast tokenizer there")
    return Tokenizer.from_file(str(path))


def stop_tokens(folder: Path, configured: tuple[int, ...]) -> tuple[int, ...]:
    """Which tokens end an answer: `sampling.stop_token_ids`, else the model's own. Raises `ConfigError` when there are none."""
    if configured:
        return configured
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    raise ConfigError(f"{folder} names no eos_token_id", "set sampling.stop_token_ids")
