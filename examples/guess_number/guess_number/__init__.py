"""A number to guess, with `verifiers` 0.4: the environment is the user, who says "higher" or "lower" until the turns are used up.

Replace three things by your own: what a task has (`Number`), what the user says (`answer`), what is paid (`Guessing`). `verifiers` finds
the task set and the environment by `__all__`.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["GuessNumber", "Numbers"]
LARGEST, TURNS = 99, 4


def answer(number: int, said: str) -> str:
    """What the user says to a guess; "" where it is right."""
    found = re.search(r"[0-9]{1,2}", said)
    if found is None:
        return "Say a number."
    guess = int(found.group())
    return "" if guess == number else "Higher." if guess < number else "Lower."


class Number(vf.TaskData):
    number: int


class Guessing(vf.Task[Number]):
    @vf.reward(weight=0.9)
    async def guessed(self, trace: vf.Trace) -> float:
        return float(any(not answer(self.data.number, one.content or "") for one in trace.assistant_messages))

    @vf.reward(weight=0.1)
    async def numbers(self, trace: vf.Trace) -> float:
        """The share of turns that say a number: a model that never guesses right has something to learn from."""
        said = [one.content or "" for one in trace.assistant_messages]
        return sum(any(sign.isdigit() for sign in text) for text in said) / max(1, len(said))


class NumbersConfig(vf.TasksetConfig):
    tasks: int = 64
    seed: int = 0


class Numbers(vf.Taskset[Guessing, NumbersConfig]):
    def load(self) -> Iterable[Guessing]:
        drawn = random.Random(self.config.seed)
        prompt = f"Guess my number from 0 to {LARGEST}. You have {TURNS} guesses. Say a number, nothing else."
        for at in range(self.config.tasks):
            yield Guessing(Number(idx=at, prompt=prompt, number=drawn.randint(0, LARGEST)), self.config.task)


class GuessNumberConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})  # a plain conversation, without tools


class GuessNumber(vf.Env[GuessNumberConfig]):
    async def run(self, task: Guessing, agents: Any) -> None:
        async with agents.player.interaction(task) as talk:
            turn = await talk.turn()  # the model's reply to the prompt
            for _ in range(TURNS - 1):
                reply = "" if turn.terminated else answer(task.data.number, turn.last_reply)
                if not reply:
                    break
                turn = await talk.turn(reply)
