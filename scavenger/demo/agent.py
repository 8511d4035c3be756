"""`scavenger demo --agent`: the model learns to add with a calculator, over several turns, while engines and environment workers are lost.

Owns the run's sizes and file, and the killing of environment workers. Everything else is the demo's own; the environment is
`trainer.tasks.calculator`, built into the trainer.

Boundary: what differs from the demo of single completions.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scavenger.cluster import processes
from scavenger.host import packages

TASK, SUBJECT = "calculator", "adding with a calculator, in several turns"
CONTEXT, MAX_TOKENS = 64, 6
#: What such a process's arguments have.
WORKER = "trainer.episodes.worker"
WORKERS = 2


def check_packages() -> None:
    """Raises `ConfigError` where the gateway's packages are missing."""
    packages.require_gateway("agents call a gateway")


def changed(document: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The demo's `run.toml` with the environment in the place of the single completions. Pure."""
    data = {key: value for key, value in document["data"].items() if key != "task"}
    return {
        **{name: dict(section) for name, section in document.items()},
        "model": {**document["model"], "context_length": CONTEXT},
        "data": {
            **data,
            "environment": f"builtin:{TASK}",
            "environment_workers": WORKERS,
            "environment_concurrency": 128,
        },
        "sampling": {"max_tokens": MAX_TOKENS, "temperature": 1.0},
    }


@dataclass(slots=True)
class WorkerKiller:
    """Kills the oldest of the run's environment workers every `every_s` seconds, without notice. `folder`: that the training job runs in.

    It leaves them alone while they are fewer than `WORKERS`, while another one may still be starting (`every_s` / 2 long), and until a
    step was taken since the last one: a run may not end because a slow machine plays no episode between two kills.
    """

    folder: Path
    every_s: float
    killed: int = 0
    _seen: dict[int, float] = field(default_factory=dict)  # when each was seen first
    _last: float = 0.0
    _steps: int = -1  # taken when the last one was killed

    def look(self, now: float, steps: int) -> None:
        """`steps`: steps and evaluations taken so far."""
        found = workers_in(self.folder)
        self._seen = {pid: self._seen.get(pid, now) for pid in found}
        if self._last == 0.0:
            self._last = now
        if now - self._last < self.every_s or len(found) < WORKERS or steps <= self._steps:
            return
        if now - max(self._seen.values()) < self.every_s / 2:
            return
        oldest = min(found, key=lambda pid: (self._seen[pid], pid))
        processes.send([oldest], signal.SIGKILL)
        self._last, self._steps, self.killed = now, steps, self.killed + 1


def workers_in(folder: Path) -> list[int]:
    """Environment workers of the training job that runs in this folder."""
    found = []
    for pid in processes.snapshot():
        if WORKER in processes.title(pid).split():
            try:
                here = Path(os.readlink(f"/proc/{pid}/cwd")) == folder
            except OSError:  # it is gone, or not ours
                continue
            if here:
                found.append(pid)
    return sorted(found)
