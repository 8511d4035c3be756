"""The engines that the contract is held against, and what each promises of it.

vLLM takes seconds to start and belongs to the event loop that it was started on: its engines are kept for the whole session, by spec, and
its tests share one loop. An engine that is closed goes back, without requests and weights.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from rollout.engines.base import Engine, EngineHost
from rollout.engines.registry import builder, with_stops
from scavenger.protocol.messages import EngineSpec
from tests.rollout import models

T = TypeVar("T")


class Reference:
    """Draws each token by its place in the sample: what it makes does not depend on anything else."""

    name, dtype = "reference", "float64"
    draws_by_place = True
    close_logprobs = 1e-12  # between two ways to compute the same one
    max_batch = 16

    def __init__(self) -> None:
        self.model = models.plain_model(self.text())
        self.views = models.views(self.model)

    def text(self, model_type: str = "qwen3", **changes: Any) -> str:
        return models.config_text(model_type, **changes)

    def spec(self, text: str | None = None, **changes: Any) -> EngineSpec:
        mine: dict[str, Any] = {"name": self.name, "dtype": self.dtype, "max_batch": self.max_batch}
        return models.spec(text or self.text(), **mine | changes)

    async def start(self, spec: EngineSpec) -> Engine:
        return await builder(self.name)(spec, EngineHost("run"))

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(main)


class Vllm(Reference):
    """The smallest heads that its CPU kernels take, and its widest dtype."""

    name, dtype = "vllm", "float32"
    draws_by_place = False
    close_logprobs = 1e-4

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._idle: dict[EngineSpec, list[Any]] = defaultdict(list)
        self._started: list[Any] = []

    def text(self, model_type: str = "qwen3", **changes: Any) -> str:
        return models.config_text(model_type, **{"head_dim": 32} | changes)

    async def start(self, spec: EngineSpec) -> Engine:
        async def taken(spec: EngineSpec, host: EngineHost) -> Engine:
            if self._idle[spec]:
                return Kept(self, spec, self._idle[spec].pop())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vLLM's own, at its import
                from rollout.engines.vllm import engine as vllm

                self._started.append(await vllm.build(spec, host))
                return Kept(self, spec, self._started[-1])

        return await with_stops(taken)(spec, EngineHost("run"))

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(main)

    def put_back(self, spec: EngineSpec, engine: Any) -> None:
        self._idle[spec].append(engine)

    def close(self) -> None:
        async def all_of_them() -> None:
            for engine in self._started:  # those that a failed test kept too
                await engine.close()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._runner.run(all_of_them())
            self._runner.close()


class Kept:
    """An engine whose `close` gives it back instead."""

    def __init__(self, kind: Vllm, spec: EngineSpec, engine: Any) -> None:
        self._kind, self._spec, self.bare = kind, spec, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)

    async def close(self) -> None:
        await self.bare._end_streams()
        if self.bare._asleep:
            await self.bare.wake()
        self.bare._usable = False
        if self.bare._core.fault is None:
            self._kind.put_back(self._spec, self.bare)
        else:
            await self.bare.close()


Kind = Reference
REFERENCE = pytest.param("reference")
#: vLLM's own warnings are not ours to make errors of.
QUIET = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
VLLM = pytest.param("vllm", marks=QUIET)
VLLM_LONG = pytest.param("vllm", marks=[*QUIET, pytest.mark.long])
EVERY = pytest.mark.parametrize("kind", [REFERENCE, VLLM], indirect=True)
#: vLLM would have to be started for this one alone.
EVERY_LONG = pytest.mark.parametrize("kind", [REFERENCE, VLLM_LONG], indirect=True)
REFERENCE_ONLY = pytest.mark.parametrize("kind", [REFERENCE], indirect=True)
VLLM_ONLY = pytest.mark.parametrize("kind", [VLLM], indirect=True)
VLLM_ONLY_LONG = pytest.mark.parametrize("kind", [VLLM_LONG], indirect=True)
