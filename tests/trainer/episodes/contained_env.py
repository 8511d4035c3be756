"""A harness whose agent is a program in a container: each turn it asks the model with the image's own Python. Needs `verifiers` (0.4).

Task set, tool and reward are those of `counting_env`. What a turn finds in the container is its own end where that is wrong.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import asyncio
import json
from typing import Any

import verifiers.v1 as vf

from tests.trainer.episodes.counting_env import Talking, TalkingConfig, count

__all__ = ["Contained"]

#: Standard library only. The work folder must keep what earlier turns wrote, and nothing of the host may be there.
PROGRAM = """
import json, os, sys, urllib.request
endpoint, secret, model, marker, hidden, said = sys.argv[1:]
said = json.loads(said)
assert os.path.exists(marker), "not in the image"
assert not os.path.exists(hidden), "a file of the host is here"
assert os.getpid() < 1000 and not os.environ.get("SCAVENGER_OF_THE_HOST"), "processes or variables of the host are here"
with open("turns", "a+") as turns:
    turns.seek(0)
    assert turns.read() == "t" * (len(said) // 2), "another work folder"
    turns.write("t")
body = json.dumps({"model": model, "messages": said}).encode()
headers = {"Authorization": "Bearer " + secret, "content-type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(endpoint + "/chat/completions", body, headers)) as answer:
    print(json.dumps(json.load(answer)["choices"][0]["message"]["content"] or ""))
"""


class ContainedConfig(TalkingConfig):
    python: str = "/agent/python"  # the image's
    marker: str = "/agent"  # a path of the image only
    hidden: str = ""  # one of the host only


class Contained(Talking, vf.Harness[ContainedConfig]):
    NEEDS_CONTAINER = True
    EXECUTES_CODE = True

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
        done = vf.ProgramResult(exit_code=0, stdout="", stderr="")
        for turn in range(trace.task.data.turns):
            if turn:
                await asyncio.sleep(self.config.pause)
                self._die()
            told = [endpoint, secret, ctx.model, self.config.marker, self.config.hidden, json.dumps(said)]
            done = await runtime.run([self.config.python, "-I", "-c", PROGRAM, *told], {})
            if done.exit_code:
                return done
            text = json.loads(done.stdout)
            said += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"{count(text)} digits"},
            ]
        return done
