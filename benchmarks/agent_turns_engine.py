"""`python -m benchmarks.agent_turns_engine FOLDER -m rollout ...`: the worker with vLLM, whose own counters of prompt tokens are in FOLDER.

vLLM counts, for each request that it begins, the tokens of its prompt and those of them that its prefix cache had. The worker leaves that
off; here it is on, and after each iteration the sums are written to a file of the process. Nothing else of the engine is changed.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of one engine since its start. `tokens`: of all prompts that it began; `computed`: of these, what its cache did not have, and what it
    had to compute again of requests that it had set aside for lack of room."""

    engine: int  # its process
    tokens: int
    computed: int


def python(folder: Path) -> Path:
    """A Python for `harvest.python`: engines that it is asked to run are counted, all else runs as it is."""
    program = folder / "python-with-counters"
    runs, counted = (
        shlex.quote(sys.executable),
        f"-m benchmarks.agent_turns_engine {shlex.quote(str(folder))}",
    )
    program.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))}\n"
        f'if [ "$1 $2" = "-m rollout" ]; then exec {runs} {counted} "$@"; fi\nexec {runs} "$@"\n'
    )
    program.chmod(0o755)
    return program


def read(folder: Path) -> list[Prompts]:
    """What all engines have counted."""
    found = []
    for path in sorted(folder.glob("*.prompts")):
        tokens, computed = map(int, path.read_text().split())
        found.append(Prompts(int(path.stem), tokens, computed))
    return found


def count(folder: Path) -> None:
    """Have every vLLM engine of this process note what it computes."""
    from rollout.engines.vllm import setup

    arguments = setup.arguments

    def counted(*given: Any) -> dict[str, Any]:
        register(folder)  # vLLM may be imported by now: its environment is set
        return {**arguments(*given), "disable_log_stats": False}

    setattr(setup, "arguments", counted)  # noqa: B010  mypy refuses to assign to a function of a module


def register(folder: Path) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):  # type: ignore[misc]  # of a class without types where vLLM is missing
        """vLLM tells it of each iteration."""

        def __init__(self, *_given: Any) -> None:
            self.tokens = self.computed = 0

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_more: Any, **_named: Any) -> None:
            if iteration_stats is not None:
                self.tokens += iteration_stats.prompt_token_stats.total
                self.computed += iteration_stats.prompt_token_stats.computed
            if scheduler_stats is not None:
                again = scheduler_stats.prefix_cache_stats
                self.computed += again.preempted_queries - again.preempted_hits
            fresh = folder / f"{os.getpid()}.new"
            fresh.write_text(f"{self.tokens} {self.computed}")
            fresh.rename(folder / f"{os.getpid()}.prompts")  # it is read while it is written

        def log_engine_initialized(self) -> None: ...

    start = AsyncLLM.from_engine_args

    def started(*given: Any) -> Any:
        return start(*given, stat_loggers=[Counter])

    setattr(AsyncLLM, "from_engine_args", started)  # noqa: B010  nor to a method


def main() -> None:
    folder, flag, module = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    assert flag == "-m", sys.argv
    sys.argv = sys.argv[3:]
    count(folder)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
