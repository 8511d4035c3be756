"""An environment whose agent is a program: it asks the model once, then runs what its task says in a shell. Needs `verifiers` (0.4).

The reward is 1 where the program's last command left the file `done` in its work folder.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["Commands", "Program"]

#: The agent: standard library only, since it runs where the harness's packages need not be.
PROGRAM = """
import json, sys, urllib.request
endpoint, secret, model, prompt = sys.argv[1:]
body = json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}]}).encode()
headers = {"Authorization": "Bearer " + secret, "content-type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(endpoint + "/chat/completions", body, headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


class CommandData(vf.TaskData):
    command: str


class CommandTask(vf.Task[CommandData]):
    @vf.reward(weight=1.0)
    async def done(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["test", "-e", "done"], {})).exit_code == 0)


class CommandsConfig(vf.TasksetConfig):
    commands: list[str] = []


class Commands(vf.Taskset[CommandTask, CommandsConfig]):
    def load(self) -> Iterable[CommandTask]:
        for number, command in enumerate(self.config.commands):
            data = CommandData(idx=number, prompt=f"do {number}", command=command)
            yield CommandTask(data, self.config.task)


class Program(vf.Harness[vf.HarnessConfig]):
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
        import sys

        said = await runtime.run(
            [sys.executable, "-I", "-c", PROGRAM, endpoint, secret, ctx.model, str(data.prompt)], {}
        )
        if said.exit_code:
            return said
        return await runtime.run_program(["bash", "-c", trace.task.data.command], {})
