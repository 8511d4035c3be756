"""What an engine around another engine passes on as it is."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.engines.base import Engine, EngineInfo
from scavenger.protocol.worker.events import HearSiblings, Speculated


class Around:
    """The part of `base.Engine` that is the inner engine's own affair. A subclass has the rest."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def info(self) -> EngineInfo:
        return self._engine.info()

    async def wake(self) -> None:
        await self._engine.wake()

    async def bytes_held(self) -> Sequence[int]:
        return await self._engine.bytes_held()

    def progress(self) -> int:
        return self._engine.progress()

    def speculated(self) -> Speculated:
        return self._engine.speculated()

    async def hear(self, news: HearSiblings) -> None:
        await self._engine.hear(news)
