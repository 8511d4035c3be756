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
import torch  # noqa: E402  after the check that it is there

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
        # Blocks that are not all there when vLLM reads them: it computes them, and lives.
        prompt = (2, *PROMPT[1:])
        short = Kv(prompt[:64], blocks.data[:-64])
        whole = (await finish(one, asked(6, (), prompt)))[6]
        assert (await rest(other, asked(6, (), prompt), short)).token_ids == whole.token_ids
        assert other._moves._blocks.brought == {}, "with its first token its memory is given back"
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


def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our connector, with two layers of eight blocks of four tokens, as vLLM makes it but for its base class's part."""
    from rollout.engines.vllm.connector import KvLoads, KvMover

    mover: Any = object.__new__(KvMover)
    cache = SimpleNamespace(block_size=4, cache_dtype="auto", kv_cache_layout="NHD")
    monkeypatch.setattr(KvMover.__mro__[1], "__init__", lambda self, **_how: None)
    KvMover.__init__(mover, SimpleNamespace(cache_config=cache), None, None)
    mover._vllm_config = SimpleNamespace(cache_config=cache)
    mover.register_kv_caches({name: torch.zeros(8, 2, 4, 3) for name in "ab"})
    mover._get_connector_metadata = lambda: KvLoads(mover.loads)
    return mover


def told(tokens: int = 8, path: str = "/dev/null") -> Any:
    return SimpleNamespace(request_id="7", kv_transfer_params={"path": path, "tokens": tokens})


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import
@pytest.mark.timeout(600)
def test_a_request_loads_once_though_all_its_tokens_were_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted and resumed, it would read memory that is given back by then, or another request's."""
    mover = connector(monkeypatch)
    assert mover.get_num_new_matched_tokens(told(), 0) == (8, True), "and vLLM waits for it"
    assert mover.get_num_new_matched_tokens(told(), 8) == (0, False)
    mover.update_state_after_alloc(told(), None, 0)
    assert mover.get_num_new_matched_tokens(told(), 0) == (0, False)
    mover.build_connector_meta(SimpleNamespace(finished_req_ids={"7"}))
    assert mover._asked == set()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["whole", "short", "long", "gone", "empty"])
def test_blocks_that_cannot_be_loaded_are_named_to_vllm(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, nbytes = connector(monkeypatch), 2 * 8 * 2 * 3 * 4  # layers, tokens, heads, entries, float32
    path = tmp_path / "blocks"
    path.write_bytes(b"\1" * {"short": nbytes - 4, "long": nbytes + 4, "empty": 0}.get(what, nbytes))
    if what == "gone":
        path.unlink()
    mover.update_state_after_alloc(
        told(path=str(path)), SimpleNamespace(get_block_ids=lambda: ([5, 3, 6],)), 4
    )
    mover.loads = mover.build_connector_meta(SimpleNamespace(finished_req_ids=set())).requests
    mover.start_load_kv(None)
    # The first block was cached here already; the third is of tokens that are computed.
    assert mover.get_block_ids_with_load_errors() == (set() if what == "whole" else {3})
    assert mover.get_finished(set()) == (None, {"7"}), "else vLLM would wait for ever"
    assert mover.get_block_ids_with_load_errors() == set()
    assert mover.get_finished(set()) == (None, None)
    written = {int(block) for cache in mover._caches for block in cache.flatten(1).any(1).nonzero()}
    assert written == ({3} if what == "whole" else set())


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's own, at its import
@pytest.mark.timeout(600)
def test_the_layout_names_all_in_which_two_engines_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    def layout(release: str = "1", backend: str = "a.B", **cache: object) -> str:
        mover = connector(monkeypatch)
        monkeypatch.setattr(vllm, "__version__", release)
        vars(mover._vllm_config.cache_config).update(cache)
        dtype = cache.get("dtype", torch.float32)
        mover._caches = [one.to(dtype) for one in mover._caches]
        found, nbytes, block = mover.shape([backend])
        assert (nbytes, block) == (2 * 2 * 3 * mover._caches[0].element_size(), 4)
        return str(found)

    assert layout() == layout()
    others = [
        layout("2"),
        layout(backend="a.C"),
        layout(cache_dtype="fp8"),
        layout(kv_cache_layout="HND"),
        layout(dtype=torch.bfloat16),
    ]
    assert len({layout(), *others}) == 6


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
        await asyncio.gather(*engine._blocks._letting_go)
        assert not Path(Waiting.path).exists()

    asyncio.run(main())


@pytest.mark.parametrize(
    "wipe",
    [lambda engine: engine._cleanse("2"), lambda engine: engine.drop(1)],
    ids=["a request met NaN", "a loan ended"],
)
def test_blocks_that_a_wipe_zeroed_are_not_given_out(wipe: Any) -> None:
    """The requests that run are computed again, and vLLM's worker learns of that with their next pass."""

    class Running(Llm):
        async def generate(self, *_args: object, **_how: object) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

        async def collective_rpc(self, name: str, _timeout: float, args: tuple[Any, ...] = ()) -> list[Any]:
            return [True]

    async def main() -> None:
        engine = engine_of(Running())
        engine._usable, engine._blocks.token_nbytes, engine._blocks.block_tokens = True, 4, 32
        await engine.add(asked(1))
        assert await engine.take_kv(1, 64) is not None
        await wipe(engine)
        assert await engine.take_kv(1, 64) is None
        await engine.abort([1])

    asyncio.run(main())
