"""The built-in environment: add four numbers with a calculator that adds two, over several turns. Pure.

    prompt        07+23+11+19>
    the model     07+23           a call: the calculator is asked
    calculator    30>
    the model     30+11
    calculator    41>
    the model     41+19
    calculator    60>
    the model     =60             the answer: the episode is over, reward 1

Owns the tasks, the calculator, the reward and the character tokenizer. A task depends on its number alone. Needs no torch and no package
`verifiers`. The tasks of the environment are none of those that `trainer.tiny` warms a model up with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import blake3
from tokenizers import Tokenizer

from trainer.tasks import sort

#: Numbers of a task, and the largest of them: every sum has two digits.
TERMS, LARGEST = 4, 24
#: Tasks of the environment.
TASKS = 4096
#: Turns of an episode at most: one more than are needed, and one for the answer.
MOST_TURNS = TERMS + 1
#: What a right step earns where turns are rewarded.
STEP = 0.25
#: What the calculator displays where it was asked for no sum of two digits.
REFUSED = "?"
ALPHABET = (sort.PAD, sort.EOS, *"0123456789>+=?")
_CALL, _ANSWER = re.compile(r"([0-9]{2})\+([0-9]{2})", re.ASCII), re.compile(r"=([0-9]{2})", re.ASCII)
#: One task in this many is of the environment; a model is warmed up with the others.
SHARE = 4


@dataclass(frozen=True, slots=True)
class Observation:
    """The calculator's display: the episode goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The episode is over. `why`: "" where the model answered."""

    reward: float
    why: str = ""


def is_of_environment(terms: tuple[int, ...]) -> bool:
    return blake3.blake3(bytes(terms)).digest()[0] % SHARE == 0


def task(number: int, *, warm_up: bool = False) -> tuple[int, ...]:
    """The numbers of a task. `warm_up`: of the stream that models are warmed up with."""
    split, attempt = "warm-up" if warm_up else "environment", 0
    while True:
        digest = blake3.blake3(f"calculator/{split}/{number}/{attempt}".encode()).digest()
        terms = tuple(byte % (LARGEST + 1) for byte in digest[:TERMS])
        if is_of_environment(terms) is not warm_up:
            return terms
        attempt += 1


def prompt(terms: tuple[int, ...]) -> str:
    return "+".join(f"{term:02d}" for term in terms) + ">"


def calculated(said: str) -> str:
    """What the calculator displays for a call: the sum, or `REFUSED`."""
    found = _CALL.fullmatch(said)
    total = int(found[1]) + int(found[2]) if found else 100
    return f"{total:02d}" if total < 100 else REFUSED


def replied(terms: tuple[int, ...], turn: int, said: str) -> Observation | Ended:
    """What follows from the model's words in its turn number `turn`, from 1."""
    answer = _ANSWER.fullmatch(said)
    if answer:
        return Ended(1.0 if int(answer[1]) == sum(terms) else 0.0)
    if turn >= MOST_TURNS:
        return Ended(0.0, "max_turns")
    return Observation(f"{calculated(said)}>")


def step_rewards(terms: tuple[int, ...], said: Sequence[str]) -> list[float]:
    """What each turn earns where turns are rewarded: `STEP` for each number that is added to the sum so far, in their order, and the rest
    of 1 for the right answer. A whole right play has 1."""
    total, added, rewards = terms[0], 1, []
    for words in said:
        answer = _ANSWER.fullmatch(words)
        if answer:
            rewards.append(1.0 - STEP * (TERMS - 1) if int(answer[1]) == sum(terms) else 0.0)
        elif added < TERMS and words == f"{total:02d}+{terms[added]:02d}":
            total, added = total + terms[added], added + 1
            rewards.append(STEP)
        else:
            rewards.append(0.0)
    return rewards


def turns_of(terms: tuple[int, ...]) -> list[str]:
    """What a model says that adds one number after another."""
    total, said = terms[0], []
    for term in terms[1:]:
        said.append(f"{total:02d}+{term:02d}")
        total += term
    return [*said, f"={total:02d}"]


def write_tokenizer(folder: Path) -> None:
    """`tokenizer.json` and the little that Hugging Face's loaders want beside it."""
    sort.write_characters(folder, ALPHABET)


def tokenizer() -> Tokenizer:
    return sort.characters(ALPHABET)
