"""What vLLM's process is told of samples' siblings elsewhere, for its drafts, and what it says of them.

Owns the messages that wait to be told. Requests do not wait for them, and a message that is dropped costs drafts, never a token.

Boundary: between samples' siblings and the requests that are computed: nothing of it reaches a request but by vLLM's proposer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from rollout.engines.vllm.core import Core
from rollout.engines.vllm.proposer import Heard, group_name
from scavenger.errors import EngineError
from scavenger.protocol.worker.events import NOT_SPECULATED, HearSiblings, Speculated

MAX_NEWS = 64  # messages that wait while vLLM's process does something else; then the oldest is dropped
ASK_S = 1.0  # between two questions to vLLM's process what speculation did


class SiblingDrafts:
    """Of one engine. `on`: whether it speculates; else nothing is told or asked."""

    def __init__(self, core: Core, vocab_size: int, *, on: bool) -> None:
        self.speculated: Speculated = NOT_SPECULATED  # as vLLM's process said last
        self.introduced: set[str] = set()  # groups whose prompt that process was told
        self._core, self._vocab_size, self._on = core, vocab_size, on
        self._news: deque[HearSiblings] = deque(maxlen=MAX_NEWS)  # not yet told
        self._telling: asyncio.Task[None] | None = None
        self._ask_at = 0.0

    def hear(self, news: HearSiblings) -> None:
        if not self._on:
            return
        self._news.append(news)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def ask(self) -> None:
        """What speculation did, once in a while."""
        now = asyncio.get_running_loop().time()
        if not self._on or now < self._ask_at:
            return
        self._ask_at = now + ASK_S
        (counts, *_) = await self._core.rpc("scavenger_speculated")
        self.speculated = Speculated(*counts)

    async def stop(self) -> None:
        """Tell nothing more."""
        self.cancel()
        if self._telling is not None:
            await asyncio.gather(self._telling, return_exceptions=True)

    def cancel(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    def forget(self) -> None:
        """What was heard, and what was done with it."""
        self.speculated = NOT_SPECULATED
        self._news.clear()
        self.introduced.clear()

    async def _tell(self) -> None:
        """A dead core is noticed by the requests."""
        with contextlib.suppress(EngineError):
            while self._news:
                said, over = self._named(self._news.popleft())
                await self._core.rpc("scavenger_hear", said, over)

    def _named(self, news: HearSiblings) -> tuple[list[Heard], list[str]]:
        said: list[Heard] = []
        for one in news.said:
            # A draft goes through the model before it is verified: it must be of this vocabulary.
            if one.token_ids and min(one.token_ids) >= 0 and max(one.token_ids) < self._vocab_size:
                name = group_name(one.group.key, one.group.prompt)
                prompt = None if name in self.introduced else one.group.prompt
                self.introduced.add(name)
                said.append((name, prompt, one.index, one.offset, one.token_ids))
        over = [group_name(group.key, group.prompt) for group in news.over]
        self.introduced.difference_update(over)
        return said, over
