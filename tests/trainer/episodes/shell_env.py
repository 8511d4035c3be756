"""An environment whose task is a command of a shell: the agent leaves a file in its work folder. Any harness with a shell plays it. Needs
`verifiers` (0.4).

`Minimal` is mini-swe-agent as the package has it, without its demand for a container.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers.v1.harnesses.mini_swe_agent.harness import MiniSWEAgentHarness

__all__ = ["Minimal", "Shell"]

FILE, CONTENTS = "done", "42"


class ShellTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def done(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["cat", FILE], {})).stdout.strip() == CONTENTS)

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class ShellConfig(vf.TasksetConfig):
    tasks: int = 2


class Shell(vf.Taskset[ShellTask, ShellConfig]):
    def load(self) -> Iterable[ShellTask]:
        for number in range(self.config.tasks):
            data = vf.TaskData(idx=number, prompt=f"Write {CONTENTS} into the file `{FILE}`. {number}")
            yield ShellTask(data, self.config.task)


class Minimal(MiniSWEAgentHarness):
    NEEDS_CONTAINER = False
