"""vLLM on a further node of its engine: this node's ranks, and the weights that lie beside them.

Owns vLLM's executor as it runs without a core, one process a rank, and the file that tells those processes where a version lies in this
node's memory: what the core names are files of the first node. Knows no daemon.

Boundary: vLLM's own processes on a further node; IO.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing.connection
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollout.engines import published
from rollout.engines.base import EngineHost, Weight
from rollout.engines.vllm import setup
from rollout.engines.vllm.setup import MemoryFiles
from rollout.engines.vllm.worker import BESIDE
from scavenger.errors import EngineError, describe
from scavenger.protocol.messages import EngineSpec


def build(spec: EngineSpec, host: EngineHost) -> FurtherVllm:
    """Start this node's ranks; returns when those of all nodes have found each other. Raises `EngineError`."""
    gpu = torch.cuda.is_available()
    values, layout, config = setup.checked_config(spec)
    folder = setup.prepare_environment(gpu, host)
    try:
        (folder / "config.json").write_text(json.dumps(values))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        arguments = AsyncEngineArgs(**setup.arguments(spec, host, folder, config, gpu))
        executor = MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, EngineError):
            raise
        raise EngineError(
            f"vLLM did not start on node {host.nodes.place + 1 if host.nodes else 1} of its engine: {describe(error)}",
            "its own words are in the job's log; docs/engines.md has the usual causes",
            quoted=str(error),
        ) from error
    return FurtherVllm(layout, folder, executor)


class FurtherVllm:
    """`headless.FurtherEngine` over vLLM's executor."""

    def __init__(self, layout: published.PublishedLayout, folder: Path, executor: Any) -> None:
        self._layout, self._folder, self._executor = layout, folder, executor
        self._memory: MemoryFiles | None = None

    def place(self, version: int, views: Sequence[Weight]) -> None:
        self.forget()
        memory = self._memory = MemoryFiles(published.checked(self._layout, list(views)))
        text = json.dumps(
            {"version": version, "paths": memory.paths, "table": memory.table, "merges": memory.merges}
        )
        beside = self._folder / BESIDE
        beside.with_suffix(".new").write_text(text)
        os.replace(beside.with_suffix(".new"), beside)

    def forget(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            (self._folder / BESIDE).unlink(missing_ok=True)
            memory.__exit__(None, None, None)

    async def died(self) -> str:
        sentinels = [one.proc.sentinel for one in self._executor.workers]
        gone = await asyncio.get_running_loop().run_in_executor(
            None, multiprocessing.connection.wait, sentinels
        )
        rank = next(one.rank for one in self._executor.workers if one.proc.sentinel in gone)
        return f"vLLM's rank {rank} ended by itself; its last words are in the job's log"

    def close(self) -> None:
        for one in self._executor.workers:
            one.proc.kill()
        self.forget()
        shutil.rmtree(self._folder, ignore_errors=True)
