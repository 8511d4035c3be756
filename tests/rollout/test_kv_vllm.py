"""KV blocks that move between two vLLM engines, through its connector interface: greedy tokens are those of the undisturbed sample.

One pair of engines is started for all that needs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rollout.engines.base import Kv
from scavenger.protocol.messages import SampleKey, Sampling
from scavenger.protocol.worker.events import Request

pytest.importorskip("torch", reason="the engines need the [trainer] extra")
kinds = pytest.importorskip("tests.rollout.kinds")
from rollout.engines.vllm import worker  # noqa: E402  needs torch
from tests.rollout.test_asleep import Llm, engine_of  # noqa: E402  needs torch
from tests.rollout.test_engine_contract import finish  # noqa: E402  needs torch
from tests.rollout.test_kv import first, rest  # noqa: E402  needs torch

PROMPT = tuple(1 + place * 7 % 27 for place in range(70))
TOKENS, CUT = 24, 14  # 83 tokens have entries by then: two blocks of 32


def asked(handle: int, accepted: tuple[int, ...] = (), prompt: tuple[int, ...] = PROMPT) -> Request:
    how = Sampling(TOKENS, 0.0)
    return Request(handle, prompt, accepted, TOKENS - len(accepted), how, 7, SampleKey("train", 0, 1, 0))


@kinds.VLLM_ONLY_LONG
def test_blocks_move_from_one_engine_to_another_and_are_what_it_generates_from(kind: Any) -> None:
    async def main() -> None:
        spec = replace(kind.spec(), move_kv=True)
        one, other = await kind.start(spec), await kind.start(spec)
        for engine in (one, other):
            await engine.load(1, kind.views)
        assert one.kv_layout() == other.kv_layout() != ""
        assert one.kv_tokens(83) == 64
        whole = (await finish(one, asked(1)))[1]
        made = await first(one, asked(2), CUT)
        blocks = await one.take_kv(2, len(PROMPT) + CUT - 1)
        assert blocks is not None
        assert blocks.tokens == PROMPT[:64]
        assert blocks.data.nbytes == 64 * one.kv_token_nbytes()
        assert await one.take_kv(3, 64) is None, "no such request"
        moved = await rest(other, asked(2, made[:CUT]), blocks)
        assert made[:CUT] + moved.token_ids == whole.token_ids
        # The control: were they not read, wrong ones would change nothing.
        prompt = (*PROMPT[:-1], 3)  # another one, of which the second engine has no prefix
        wrong = Kv((0, *prompt[1:64]), memoryview(bytes(blocks.data.nbytes)))
        bad = await rest(other, asked(4, (), (0, *prompt[1:])), wrong)
        good = (await finish(one, asked(5, (), (0, *prompt[1:]))))[5]
        assert bad.token_ids != good.token_ids
        for engine in (one, other):
            await engine.close()

    kind.run(main())


@pytest.mark.parametrize("scheduled", [True, False])
def test_blocks_of_a_request_that_vllm_preempted_are_not_given_out(
    scheduled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's worker knows of its blocks is of before: they are other requests' by now."""
    taken: list[object] = []
    mover = SimpleNamespace(copy_out=lambda *what: taken.append(what))
    monkeypatch.setattr(worker, "_mover", lambda: mover)
    known = {"7-ab": SimpleNamespace(num_computed_tokens=64, block_ids=[[3, 4]])}
    batch = SimpleNamespace(req_id_to_index={"7-ab": 0} if scheduled else {})
    extension: Any = SimpleNamespace(model_runner=SimpleNamespace(requests=known, input_batch=batch))
    assert worker.Extension.scavenger_take_kv(extension, "7", 64, "path") is scheduled
    assert taken == ([([3, 4], 64, "path")] if scheduled else [])


def test_a_request_s_blocks_stay_where_they_are_until_vllm_has_dropped_it() -> None:
    """It may be scheduled when it is aborted: what it then reads must not be gone, or another request's."""

    class Waiting(Llm):
        dropped = asyncio.Event()
        path = ""

        async def generate(
            self, _prompt: object, params: Any, *_args: object, **_how: object
        ) -> AsyncIterator[Any]:
            Waiting.path = params.extra_args["kv_transfer_params"]["path"]
            await asyncio.Event().wait()
            yield

        async def collective_rpc(self, name: str, _timeout: float, args: tuple[Any, ...] = ()) -> list[Any]:
            await self.dropped.wait()
            return [None]

    async def main() -> None:
        engine = engine_of(Waiting())
        engine._usable = True
        await engine.add_with_kv(asked(1), Kv(PROMPT[:64], memoryview(b"of request 1")))
        async with asyncio.timeout(30):
            while not Waiting.path:
                await asyncio.sleep(0)
        await engine.abort([1])
        for _ in range(10):
            await asyncio.sleep(0)
        assert Path(Waiting.path).read_bytes() == b"of request 1"
        Waiting.dropped.set()
        await asyncio.gather(*engine._letting_go)
        assert not Path(Waiting.path).exists()

    asyncio.run(main())


def test_blocks_that_a_wipe_zeroed_are_not_given_out() -> None:
    """After a request met NaN; the others are computed again, and vLLM's worker learns of that with their next pass."""

    class Running(Llm):
        async def generate(self, *_args: object, **_how: object) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

        async def collective_rpc(self, name: str, _timeout: float, args: tuple[Any, ...] = ()) -> list[Any]:
            return [True]

    async def main() -> None:
        engine = engine_of(Running())
        engine._usable, engine._kv_shape = True, ("layout", 4, 32)
        await engine.add(asked(1))
        assert await engine.take_kv(1, 64) is not None
        await engine._cleanse()
        assert await engine.take_kv(1, 64) is None
        await engine.abort([1])

    asyncio.run(main())
