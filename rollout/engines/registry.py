"""Which engines there are. Their modules are imported only when asked for: torch takes a second, vLLM many."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import cast

from rollout.engines import shared
from rollout.engines.base import Engine, EngineHost, MovesKv
from rollout.engines.stopping import Stopping, StoppingLender, StoppingMover
from scavenger.errors import EngineError
from scavenger.protocol.messages import EngineSpec

MODULES = {"reference": "rollout.engines.reference", "vllm": "rollout.engines.vllm.engine"}
Build = Callable[[EngineSpec, EngineHost], Awaitable[Engine]]


def builder(name: str) -> Build:
    """The `build(spec, host)` coroutine function of an engine. Blocks while its module is imported. Raises `EngineError`."""
    if name not in MODULES:
        raise EngineError(f"there is no engine {name!r}", f"use one of {', '.join(sorted(MODULES))}")
    return with_stops(cast(Build, importlib.import_module(MODULES[name]).build))


def with_stops(bare: Build) -> Build:
    """No engine matches stop texts itself."""

    async def build(spec: EngineSpec, host: EngineHost) -> Engine:
        engine = await bare(spec, host)
        if spec.shareable and host.may_lend and shared.can_share(engine):
            lender = shared.SharedBatch(engine).lender
            return StoppingLender(lender, lender)
        return StoppingMover(engine, engine) if isinstance(engine, MovesKv) else Stopping(engine)

    return build
