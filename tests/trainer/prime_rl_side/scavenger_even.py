"""A task set and an agent of `verifiers` as prime-rl pins it (0.3.1.dev62): six digits are asked, and even ones are worth something.

The agent talks within the environment server's process.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["Asking", "Even"]


class EvenTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def even(self, trace: vf.Trace) -> float:
        """Share of even digits among what was said."""
        said = trace.last_reply
        return sum(c in "02468" for c in said) / len(said) if said else 0.0


class Even(vf.Taskset[EvenTask, vf.TasksetConfig]):
    def load(self) -> Iterable[EvenTask]:
        for index in range(12):
            digits = f"{(index + 1) * 76543 % 10**6:06d}"
            yield EvenTask(vf.TaskData(idx=index, prompt=f"{digits}>"), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
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
        asked = {"model": ctx.model, "messages": [{"role": "user", "content": str(data.prompt)}]}
        async with httpx.AsyncClient(timeout=None) as http:
            answer = await http.post(
                f"{endpoint}/chat/completions", headers={"Authorization": f"Bearer {secret}"}, json=asked
            )
        if answer.status_code != 200:
            return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
