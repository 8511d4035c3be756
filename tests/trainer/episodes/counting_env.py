"""An environment of several turns with a tool, made of `verifiers`' own classes: a task set, its task with a reward, and a harness.

The model talks; after each answer the tool counts the digits in it and says so; after `turns` answers the episode is over. The reward is
the share of digits in all that the model said. Found by its module's name, as any task set is. Needs `verifiers` (0.4).
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["Counting", "Talking"]


def count(text: str) -> int:
    """The tool."""
    return sum(character.isdigit() for character in text)


class CountingData(vf.TaskData):
    turns: int
    rewards_turns: bool = False


class CountingTask(vf.Task[CountingData]):
    @vf.reward(weight=1.0)
    async def digits(self, trace: vf.Trace) -> float:
        words = [message.content or "" for message in trace.assistant_messages]
        length = max(1, sum(map(len, words)))
        if self.data.rewards_turns:
            trace.info["turn_rewards"] = [count(one) / length for one in words]
        return count("".join(words)) / length

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class CountingConfig(vf.TasksetConfig):
    tasks: int = 6
    turns: int = 2
    rewards_turns: bool = False


class Counting(vf.Taskset[CountingTask, CountingConfig]):
    def load(self) -> Iterable[CountingTask]:
        for number in range(self.config.tasks):
            data = CountingData(
                idx=number,
                prompt=f"say digits {number}",
                turns=self.config.turns,
                rewards_turns=self.config.rewards_turns,
            )
            yield CountingTask(data, self.config.task)


class TalkingConfig(vf.HarnessConfig):
    die_once: str = ""  # a file: the first process that can make it is killed at its second turn
    drift: str = ""  # a file: while it is there, the tool says something else than without it
    pause: float = 0.0
    anew: bool = False  # puts a system message before its history in each turn, as the harness `bash` of verifiers 0.4 does


class Talking(vf.Harness[TalkingConfig]):
    """Talks within the worker's process: every call goes through the endpoint that it is given, as a program's would."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        **more: Any,
    ) -> vf.ProgramResult:
        said: list[dict[str, str]] = [{"role": "user", "content": str(data.prompt)}]
        async with httpx.AsyncClient(timeout=None) as http:
            for turn in range(trace.task.data.turns):
                if turn:
                    await asyncio.sleep(self.config.pause)
                    self._die()
                if self.config.anew:
                    said = [{"role": "system", "content": "count"}, *said]
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": said},
                )
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                text = answer.json()["choices"][0]["message"]["content"] or ""
                drifted = "?" if self.config.drift and Path(self.config.drift).exists() else ""
                said += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": f"{count(text)} digits{drifted}"},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _die(self) -> None:
        if not self.config.die_once:
            return
        try:
            with open(self.config.die_once, "x"):
                pass
        except FileExistsError:
            return
        os.kill(os.getpid(), 9)
