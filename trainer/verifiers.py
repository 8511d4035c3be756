"""Reward functions that come with the trainer: `[reward] function = "trainer.verifiers:math"`, with `[reward.options]` as keywords.

Called in the reward's own process, which is killed at its deadline: a completion that sends a solver or a pattern off for hours costs
`reward.timeout_s` a try and, since it is the completion that cannot be judged, gets a reward of 0. Knows no torch, so that the
process starts at once. A row whose own answer cannot be read is an error, not a 0.

Boundary: named in run.toml, and imported by the reward's process.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from scavenger.errors import ConfigError

#: GSM8K's way to end a worked solution.
FINAL = "####"
_F = TypeVar("_F", bound=Callable[..., Any])


def prepared(prepare: Callable[..., str]) -> Callable[[_F], _F]:
    """Declares what is called once, with the function's options, before the first deadline.

    It returns what the rewards follow from beside the function's own file: that becomes part of their version.
    """

    def declare(function: _F) -> _F:
        function.__dict__.update(prepare_rewards=prepare)
        return function

    return declare


def late_is_wrong(prepare: Callable[[], object]) -> Callable[[_F], _F]:
    """Declares that a completion which cannot be judged within the deadline is wrong. `prepare` is called before the first deadline."""

    def called(**options: object) -> str:
        prepare()
        return ""

    def declare(function: _F) -> _F:
        function.__dict__.update(late_is_wrong=True)
        return prepared(called)(function)

    return declare


def whole_group(function: _F) -> _F:
    """Declares that the function rewards a group: function(prompt, completions, meta) -> a reward for each of the list `completions`."""
    function.__dict__.update(whole_group=True)
    return function


@functools.lru_cache(maxsize=1)
def _math_verify() -> tuple[Any, Any]:
    """math-verify without its own alarms: the process has a deadline, and a killed one leaves nothing half done."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            f"{sys.executable} has no math-verify",
            "pip install 'scavenger[math]', by whoever installed that Python; or trainer.verifiers:exact",
        ) from error

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return parse, verify


def exact(
    prompt: str, completion: str, meta: dict[str, Any], *, field: str = "answer", ignore_case: bool = False
) -> float:
    """1 if the completion is the row's `field`, blanks at both ends aside."""
    said, wanted = completion.strip(), str(meta[field]).strip()
    return float(said.casefold() == wanted.casefold() if ignore_case else said == wanted)


@late_is_wrong(lambda: None)
def regex(
    prompt: str, completion: str, meta: dict[str, Any], *, pattern: str, field: str = "answer"
) -> float:
    """1 if the last match of `pattern` (its first group, if it has one) is the row's `field`, blanks aside."""
    matches = list(_compiled(pattern).finditer(completion))
    if not matches:
        return 0.0
    said = matches[-1][1] if matches[-1].re.groups else matches[-1][0]
    return float((said or "").strip() == str(meta[field]).strip())


@late_is_wrong(_math_verify)
def math(prompt: str, completion: str, meta: dict[str, Any], *, field: str = "answer") -> float:
    """1 if math-verify finds the completion equal to the row's `field`: LaTeX or plain; of a worked solution, what follows `####`.

    Raises `ValueError` when the row's own answer cannot be read.
    """
    parse, verify = _math_verify()
    text = str(meta[field]).rpartition(FINAL)[2].strip()
    gold = parse(f"\\boxed{{{text}}}", parsing_timeout=None) or parse(text, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the row's {field} is not mathematics")
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


@functools.lru_cache(maxsize=8)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
