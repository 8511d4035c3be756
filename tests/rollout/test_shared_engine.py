"""One engine whose batch holds samples of several runs: each has the tokens that it has alone, and nothing of another."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from rollout.engines.base import Engine, EngineHost, Lends
from rollout.engines.registry import with_stops
from scavenger.errors import EngineError, WeightsDiffer
from scavenger.protocol.messages import Sampling
from scavenger.protocol.worker.events import Delta, Request

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
pytest.importorskip("peft", reason="the adapters need the [lora] extra")
kinds = pytest.importorskip("tests.rollout.kinds")
from rollout.engines import account, merging, reference, shared  # noqa: E402  needs torch, as all that follows
from rollout.engines.reference import ReferenceEngine  # noqa: E402
from tests.rollout.test_adapters_unmerged import Pulled  # noqa: E402
from tests.rollout.test_engine_adapters import LORA  # noqa: E402
from tests.rollout.test_engine_contract import RANDOM, finish, request, same  # noqa: E402

if TYPE_CHECKING:
    from tests.rollout.kinds import Kind
else:
    Kind = kinds.Kind
KIND = kinds.Reference()
SPEC = msgspec.structs.replace(KIND.spec(), adapter_rank=LORA.rank, shared=True)
LONG = Sampling(max_tokens=100)


class Run:
    """A run that trains adapters beside the base that all have."""

    def __init__(self, seed: int) -> None:
        self.trained = Pulled(KIND)
        self.trained.step(seed)
        self.version = self.trained.version(2)

    def next(self, seed: int) -> list[Any]:
        self.trained.step(seed)
        return self.trained.version(3)


class Shared:
    """An engine that lends slots, and what is in it."""

    def __init__(self) -> None:
        self.raw: ReferenceEngine

    async def start(self) -> Engine:
        async def build(spec: Any, host: EngineHost) -> Engine:
            self.raw = await reference.build(spec, host)
            return self.raw

        return await with_stops(build)(SPEC, EngineHost("hers"))

    def running(self) -> dict[int, int]:
        """Requests in the batch, by lane."""
        found: dict[int, int] = {}
        for row in self.raw._decoder._rows:
            found[row.lane] = found.get(row.lane, 0) + 1
        return found


def borrowed(engine: Engine, slots: int = 4) -> Engine:
    assert isinstance(engine, Lends)
    return engine.borrow(slots)


def play(scene: Callable[[Shared, Engine], Awaitable[None]]) -> None:
    async def main() -> None:
        stage = Shared()
        engine = await stage.start()
        try:
            await scene(stage, engine)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 120.0))


async def alone(version: list[Any], *requests: Request) -> dict[int, Delta]:
    """What a run has of an engine of its own."""
    engine = await KIND.start(SPEC)
    await engine.load(2, version)
    found = await finish(engine, *requests)
    await engine.close()
    return found


def some(sampling: Sampling = RANDOM, n: int = 4) -> list[Request]:
    return [request(handle, sampling) for handle in range(n)]


def test_samples_of_two_runs_in_one_batch_are_those_that_each_has_alone() -> None:
    hers, his = Run(1), Run(2)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        await guest.load(2, his.version)
        together: list[dict[int, int]] = []
        step = stage.raw._decoder.step

        def watched(*given: Any) -> list[Delta]:
            found = step(*given)
            together.append(stage.running())
            return found

        stage.raw._decoder.step = watched  # type: ignore[assignment,method-assign]  # the real one, looked at
        mine, theirs = await asyncio.gather(finish(engine, *some()), finish(guest, *some()))
        assert {0: 4, 1: 4} in together, "all of them in one batch"
        same(KIND, mine, await alone(hers.version, *some()))
        same(KIND, theirs, await alone(his.version, *some()))
        assert {d.token_ids for d in mine.values()}.isdisjoint({d.token_ids for d in theirs.values()})

    play(scene)


def test_adapters_beside_their_base_make_the_tokens_of_merged_ones() -> None:
    hers = Run(1)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        merging_engine = await KIND.start(KIND.spec())
        await merging_engine.load(2, hers.version)
        one, other = await finish(engine, *some()), await finish(merging_engine, *some())
        assert {h: d.token_ids for h, d in one.items()} == {h: d.token_ids for h, d in other.items()}
        for handle, delta in one.items():
            assert delta.logprobs == pytest.approx(other[handle].logprobs, abs=1e-3)
        await merging_engine.close()

    play(scene)


def test_a_load_of_one_run_disturbs_no_sample_of_the_other() -> None:
    hers, his = Run(1), Run(2)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        await guest.load(2, his.version)
        going = asyncio.create_task(finish(engine, *some(LONG)))
        await until_one_runs(stage)
        newer = his.next(5)
        await guest.load(3, newer)
        same(KIND, await going, await alone(hers.version, *some(LONG)))
        going = asyncio.create_task(finish(guest, *some(LONG)))
        await until_one_runs(stage)
        await engine.load(3, hers.next(6))
        same(KIND, await going, await alone(newer, *some(LONG)))

    async def until_one_runs(stage: Shared) -> None:
        while not stage.running():
            await asyncio.sleep(0)

    play(scene)


def test_nothing_of_a_borrower_is_left_when_its_loan_is_over_and_the_lender_goes_on() -> None:
    hers, his = Run(1), Run(2)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        await guest.load(2, his.version)
        decoder = stage.raw._decoder
        assert decoder._lanes is not None
        held = [
            one for beside in decoder._lanes._beside.values() for lane, one in beside.items() if lane == 1
        ]
        assert held
        for one in some(LONG):
            await guest.add(one)
        going = asyncio.create_task(finish(engine, *some(LONG, 3)))
        while stage.running() != {0: 3, 1: 4}:
            await asyncio.sleep(0)
        await guest.close()
        same(KIND, await going, await alone(hers.version, *some(LONG, 3)))
        assert decoder._lanes.lanes() == [0]
        assert not any(one.down.any() or one.up.any() for one in held), "its adapters are overwritten"
        for store in (*decoder._cache._keys, *decoder._cache._values):
            assert not store[3:].any(), "what its samples left in the cache is overwritten"
        with pytest.raises(EngineError, match="taken back"):
            await guest.add(request(9))
        with pytest.raises(EngineError, match="taken back"):
            await guest.next()

    play(scene)


def test_an_engine_that_forgets_its_run_forgets_the_borrower_s_too() -> None:
    hers, his = Run(1), Run(2)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        await guest.load(2, his.version)
        await guest.add(request(0, LONG))
        assert isinstance(engine, Lends)
        engine.recall()
        await guest.close()
        await engine.forget("theirs")
        decoder = stage.raw._decoder
        assert decoder._lanes is not None
        assert (decoder._lanes.lanes(), decoder._rows, stage.raw.borrowers()) == ([], [], frozenset())
        assert not any(tensor.any() for tensor in decoder._model.state_dict().values())
        await engine.load(1, his.version)
        same(KIND, await finish(engine, *some()), await alone(his.version, *some()))
        again = borrowed(engine)
        await again.load(1, hers.version)
        same(KIND, await finish(again, *some()), await alone(hers.version, *some()))

    play(scene)


def test_a_borrower_of_another_base_is_refused_and_the_lender_goes_on() -> None:
    hers, his = Run(1), Run(2)
    with torch.no_grad():
        first = next(iter(his.trained.model.parameters()))
        first.add_(1.0)
    changed = bytearray(his.trained.blob)
    changed[3] ^= 1
    his.trained.memory.view[:] = changed
    other = his.trained.version(2)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        with pytest.raises(EngineError, match="another base"):
            await guest.load(2, other)
        with pytest.raises(EngineError, match="no weights"):
            await guest.add(request(0))
        same(KIND, await finish(engine, *some()), await alone(hers.version, *some()))

    play(scene)


def test_when_the_lender_takes_another_base_the_borrower_is_told_and_computes_nothing_more() -> None:
    hers, his = Run(1), Run(2)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        await guest.load(2, his.version)
        await guest.add(request(0, LONG))
        await engine.load(3, KIND.views, summed=True)
        with pytest.raises(EngineError, match="holds another base"):
            await finish(guest, request(1, LONG))
        assert not stage.raw.borrowers()

    play(scene)


def test_the_lender_comes_first_and_no_more_slots_are_taken_than_were_lent() -> None:
    hers, his = Run(1), Run(2)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine, 2)
        assert guest.info().max_batch == 2
        await guest.load(2, his.version)
        await guest.add(request(0, LONG))
        await guest.add(request(1, LONG))
        with pytest.raises(EngineError, match="2 slots are lent"):
            await guest.add(request(2, LONG))
        mine = asyncio.create_task(finish(engine, *some(LONG, SPEC.max_batch)))
        await asyncio.sleep(0)
        theirs = asyncio.create_task(finish(guest))
        await theirs
        found = await mine
        assert len(found) == SPEC.max_batch
        same(KIND, found, await alone(hers.version, *some(LONG, SPEC.max_batch)))

    play(scene)


@pytest.mark.parametrize("stop", [SPEC.context_length * 1000, -1000, 2**63])
def test_a_stop_token_that_is_no_token_is_refused_alone_and_the_lender_goes_on(stop: int) -> None:
    hers, his = Run(1), Run(2)
    held_off = Sampling(24, stop_token_ids=(stop,), min_tokens=4)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        await guest.load(2, his.version)
        going = asyncio.create_task(finish(engine, *some()))
        with pytest.raises(EngineError, match="a stop token id lies outside"):
            await finish(guest, request(0, held_off))
        same(KIND, await going, await alone(hers.version, *some()))

    play(scene)


def test_samples_of_any_sampling_options_have_logprobs_and_leave_the_lender_s_as_they_are() -> None:
    hers, his = Run(1), Run(2)
    least, everything = 5e-324, tuple(range(29))
    options = (
        Sampling(24, temperature=least),
        Sampling(24, temperature=least, top_k=3, top_p=0.5),
        Sampling(24, top_k=2**31 - 1, top_p=0.0),
        Sampling(24, stop_token_ids=everything, min_tokens=24),
    )

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        await guest.load(2, his.version)
        mine, theirs = await asyncio.gather(
            finish(engine, *some()), finish(guest, *(request(n, how) for n, how in enumerate(options)))
        )
        same(KIND, mine, await alone(hers.version, *some()))
        for delta in theirs.values():
            assert delta.finish, delta.error
            assert all(map(math.isfinite, (*delta.logprobs, *delta.raw_logprobs)))
        (greedy,) = (await alone(his.version, request(0, Sampling(24, temperature=0.0)))).values()
        assert theirs[0].token_ids == greedy.token_ids

    play(scene)


def test_adapters_of_a_larger_rank_than_the_run_s_are_refused_and_the_lender_goes_on() -> None:
    hers, his = Run(1), Run(2)

    def larger(one: Any) -> Any:
        """The same adapter, with as many rows and columns of zeros more."""
        if not (isinstance(one, merging.Merged) and one.adapter is not None):
            return one
        down, up, scale = one.adapter
        (rank, width), (height, _) = down.shape, up.shape
        zeros = memoryview(bytes(4 * 2 * rank * max(width, height)))
        first = replace(down, shape=(2 * rank, width), data=zeros[: 8 * rank * width])
        return replace(
            one,
            adapter=(first, replace(up, shape=(height, 2 * rank), data=zeros[: 8 * rank * height]), scale),
        )

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        going = asyncio.create_task(finish(engine, *some()))
        with pytest.raises(EngineError, match=f"an adapter of rank {2 * LORA.rank}, not {LORA.rank}"):
            await guest.load(2, [larger(one) for one in his.version])
        with pytest.raises(EngineError, match="no weights"):
            await guest.add(request(0))
        await guest.load(3, his.version)
        same(KIND, await finish(guest, *some()), await alone(his.version, *some()))
        same(KIND, await going, await alone(hers.version, *some()))

    play(scene)


def test_the_base_of_a_borrower_is_compared_once_and_again_where_it_lies_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hers, his, other = Run(1), Run(2), Run(3)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        decoder, compared = stage.raw._decoder, 0
        holds = decoder._holds

        def counted(base: Any) -> bool:
            nonlocal compared
            compared += 1
            return holds(base)

        monkeypatch.setattr(decoder, "_holds", counted)
        guest = borrowed(engine)
        for seed, due in ((2, 1), (5, 1), (6, 1)):
            newer = his.next(seed)
            await guest.load(seed, newer)
            assert compared == due, "all requests wait while it is compared"
        same(KIND, await finish(guest, *some()), await alone(newer, *some()))
        await guest.load(7, other.version)
        assert compared == 2, "it came to other memory"
        await engine.load(3, KIND.views, summed=True)
        await engine.load(4, hers.version)
        with pytest.raises(EngineError, match="holds another base"):
            await guest.load(8, other.version)
        await borrowed(engine).load(8, other.version)
        assert compared == 3, "the base in place was replaced"

    play(scene)


def test_what_ends_the_engine_is_told_to_all_of_its_runs() -> None:
    hers, his = Run(1), Run(2)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        await guest.load(2, his.version)

        def broken(*_given: Any) -> list[Delta]:
            raise RuntimeError("no memory")

        stage.raw._decoder.step = broken  # type: ignore[assignment,method-assign]  # the fault is planted
        await engine.add(request(0))
        await guest.add(request(0))
        for one in (engine, guest):
            with pytest.raises(EngineError, match="the engine failed"):
                await one.next()

    play(scene)


def test_planted_a_token_that_is_given_to_the_other_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first test compares does find it: deltas are given by handle alone, as if all were one run's."""
    hers, his = Run(1), Run(2)

    def give(batch: shared.SharedBatch, delta: Delta) -> None:
        if delta.handle in batch._of:
            _, handle = batch._of[delta.handle]
            parts = [part for part in batch._parts.values() if handle in part.live]
            wrong = parts[-1]
            if delta.finish:
                batch.unknown(wrong, handle)
            wrong.ready.append(
                Delta(
                    handle, *[getattr(delta, n) for n in ("token_ids", "logprobs", "raw_logprobs", "finish")]
                )
            )
            wrong.fresh.set()

    monkeypatch.setattr(shared.SharedBatch, "_give", give)

    async def scene(stage: Shared, engine: Engine) -> None:
        await engine.load(2, hers.version)
        guest = borrowed(engine)
        await guest.load(2, his.version)
        await engine.add(request(0))
        theirs = await finish(guest, request(0))
        with pytest.raises(AssertionError):
            same(KIND, theirs, await alone(his.version, request(0)))

    play(scene)


def test_an_engine_that_one_run_s_samples_find_something_in_is_not_shared() -> None:
    assert SPEC.shareable
    for change in (
        {"adapter_rank": 0},
        {"shared": False},
        {"speculation": "group"},
        {"move_kv": True},
        {"keep_cache": True},
        {"routing": 2},
    ):
        assert not msgspec.structs.replace(SPEC, **change).shareable


def test_an_engine_that_shares_its_gpus_with_a_training_job_lends_nothing() -> None:
    async def main() -> None:
        for sleeps in (False, True):
            engine = await with_stops(reference.build)(SPEC, EngineHost("hers", sleeps=sleeps))
            assert isinstance(engine, Lends) is not sleeps
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("damage", [False, True])
def test_adapters_beside_their_base_come_out_of_sleep_as_they_went_into_it(damage: bool) -> None:
    hers = Run(1)

    async def main() -> None:
        engine = await reference.build(SPEC, EngineHost("hers", sleeps=True))
        await engine.load(2, hers.version)
        await engine.sleep()
        assert engine._decoder._lanes is not None
        (first, *_) = engine._decoder._lanes.tensors().values()
        if damage:
            with torch.inference_mode():
                first[0, 0] += 1
            with pytest.raises(WeightsDiffer, match="did not come out of sleep as they went into it"):
                await engine.wake()
        else:
            await engine.wake()
            same(KIND, await finish(engine, *some()), await alone(hers.version, *some()))
        await engine.close()

    asyncio.run(main())


def test_the_account_of_a_gpu_has_the_adapters_beside_the_base_but_not_while_it_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hers, path = Run(1), account.create(tmp_path / "gpu", 1 << 30)
    monkeypatch.setenv(account.VARIABLE, str(path))

    async def main() -> None:
        engine = await reference.build(SPEC, EngineHost("hers", sleeps=True))
        (bare,) = await engine.bytes_held()
        await engine.load(2, hers.version)
        decoder = engine._decoder
        assert decoder._lanes is not None
        adapters = sum(one.nbytes for one in decoder._lanes.tensors().values())
        assert adapters > 0
        assert await engine.bytes_held() == [bare + adapters]
        await engine.sleep()
        await engine.load(3, hers.next(5))
        assert await engine.bytes_held() == [0]
        await engine.wake()
        assert await engine.bytes_held() == [bare + adapters]
        await engine.close()

    asyncio.run(main())


# ---------------------------------------------------------------- vLLM


async def until_made(engine: Any, tokens: int) -> None:
    while engine.progress() < tokens:
        await asyncio.sleep(0.01)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_vllm_computes_two_runs_samples_in_one_batch_and_neither_s_load_disturbs_the_other() -> None:
    from rollout.engines.vllm import engine as vllm

    kind = kinds.Vllm()
    runs = [Pulled(kind), Pulled(kind)]
    greedy, longer = Sampling(24, temperature=0.0), Sampling(100, temperature=0.0)
    spec = msgspec.structs.replace(kind.spec(), adapter_rank=LORA.rank, shared=True)

    async def main() -> None:
        raw: list[Any] = []

        async def build(spec: Any, host: EngineHost) -> Engine:
            raw.append(await vllm.build(spec, host))
            return raw[0]  # type: ignore[no-any-return]  # vLLM's has no type here

        engine = await with_stops(build)(spec, EngineHost("hers"))
        try:
            for seed, run in enumerate(runs, 1):
                run.step(seed)
            hers, his = (run.version(2) for run in runs)
            # What each has alone, in this engine.
            expected = []
            for version in (hers, his):
                await engine.load(2, version)
                expected.append(await finish(engine, *some(greedy), *(request(n, longer) for n in (4, 5))))
            assert {d.token_ids for d in expected[0].values()}.isdisjoint(
                {d.token_ids for d in expected[1].values()}
            )
            await engine.load(3, hers)
            guest = borrowed(engine, 6)
            await guest.load(2, his)
            both = await asyncio.gather(
                *(
                    finish(one, *some(greedy), *(request(n, longer) for n in (4, 5)))
                    for one in (engine, guest)
                )
            )
            for found, due in zip(both, expected, strict=True):
                assert {h: d.token_ids for h, d in found.items()} == {h: d.token_ids for h, d in due.items()}
                for handle, delta in found.items():
                    assert delta.raw_logprobs == pytest.approx(due[handle].raw_logprobs, abs=1e-4)
            # In mid-sample of one, the other loads.
            for one, other, due in ((engine, guest, expected[0]), (guest, engine, expected[1])):
                made = raw[0].progress()
                going = asyncio.create_task(finish(one, request(4, longer)))
                await until_made(raw[0], made + 3)
                await other.load(4, his if other is guest else hers)
                assert (await going)[4].token_ids == due[4].token_ids
            going = asyncio.create_task(finish(engine, request(4, longer)))
            await guest.add(request(5, longer))
            await until_made(raw[0], raw[0].progress() + 3)
            await guest.close()
            assert (await going)[4].token_ids == expected[0][4].token_ids
            with pytest.raises(EngineError, match="taken back"):
                await guest.next()
            changed = Pulled(kind)
            changed.memory.view[3] ^= 1
            changed.step(2)
            with pytest.raises(EngineError, match="another base"):
                await borrowed(engine).load(2, changed.version(2))
            again = await finish(engine, *some(greedy))
            assert {h: d.token_ids for h, d in again.items()} == {
                n: expected[0][n].token_ids for n in range(4)
            }
        finally:
            await engine.close()

    kind.run(main())
