"""An environment with a tool server of `verifiers`, over MCP: each call writes a line into a file outside, which nothing takes back.

After each answer of the model the agent sends it by the tool, with the package's own client. The reward is 1. Needs `verifiers` (0.4).
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["Mails", "Sending"]


class MailConfig(vf.ToolsetConfig):
    outbox: str = ""
    hang_once: str = ""  # a file: the first call that can make it writes its line, and never answers


class Mail(vf.Toolset[MailConfig]):
    """The tool server: a process of its own."""

    @vf.tool
    async def send(self, text: str) -> str:
        """Send a mail."""
        with open(self.config.outbox, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")
        number = len(Path(self.config.outbox).read_text(encoding="utf-8").splitlines())
        if self.config.hang_once and _first(self.config.hang_once):
            import asyncio

            await asyncio.Event().wait()
        return f"sent {number}"


class MailData(vf.TaskData):
    turns: int


class MailTaskConfig(vf.TaskConfig):
    mail: MailConfig = MailConfig()


class MailTask(vf.Task[MailData, vf.State, MailTaskConfig]):
    @classmethod
    def toolsets(cls, config: MailTaskConfig) -> list[vf.Toolset]:
        return [Mail(config.mail)]

    @vf.reward(weight=1.0)
    async def done(self, trace: vf.Trace) -> float:
        return 1.0


class MailsConfig(vf.TasksetConfig):
    task: MailTaskConfig = MailTaskConfig()
    turns: int = 2


class Mails(vf.Taskset[MailTask, MailsConfig]):
    def load(self) -> Iterable[MailTask]:
        yield MailTask(MailData(idx=0, prompt="mail", turns=self.config.turns), self.config.task)


class SendingConfig(vf.HarnessConfig):
    die_once: str = ""  # a file: the first process that can make it is killed after its first mail
    die_when: str = ""  # a file: a process is killed once, as soon as this is there while its tool works


class Sending(vf.Harness[SendingConfig]):
    """Talks within the worker's process, and calls the tool as the package's chat programs do. The model sees six characters of an answer:
    the tests' engine has a context of 64.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
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
        from contextlib import AsyncExitStack

        from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

        said: list[dict[str, str]] = [{"role": "user", "content": str(data.prompt)}]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with httpx.AsyncClient(timeout=None) as http, AsyncExitStack() as stack:
            _, names, clients = await connect_mcp(servers, stack)
            for turn in range(trace.task.data.turns):
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": said},
                )
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                text = answer.json()["choices"][0]["message"]["content"] or ""
                watching = self._watching()
                result = await call_mcp(clients, names, "mail_send", {"text": f"turn {turn}"})
                watching()
                if turn == 0 and self.config.die_once and _first(self.config.die_once):
                    os.kill(os.getpid(), 9)
                said += [{"role": "assistant", "content": text}, {"role": "user", "content": str(result)[:6]}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _watching(self) -> Any:
        """Have this process killed once while its tool works. The result ends the watch."""
        import asyncio

        async def watch() -> None:
            while not Path(self.config.die_when).exists():
                await asyncio.sleep(0.05)
            if _first(f"{self.config.die_when}.died"):
                os.kill(os.getpid(), 9)

        if not self.config.die_when:
            return lambda: None
        return asyncio.create_task(watch()).cancel


def _first(path: str) -> bool:
    try:
        with open(path, "x"):
            return True
    except FileExistsError:
        return False


if __name__ == "__main__":
    Mail.run()
