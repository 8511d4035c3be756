"""Adapters that an engine keeps beside their base: the same tokens as merged ones, and no version's with another's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from rollout.engines.base import EngineHost
from scavenger.errors import EngineError
from scavenger.protocol.messages import Sampling
from scavenger.weights import manifest as manifests
from scavenger.weights.memory import Buffer

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
pytest.importorskip("peft", reason="the adapters need the [lora] extra")
kinds = pytest.importorskip("tests.rollout.kinds")
adapters = pytest.importorskip("trainer.model.adapters")
from rollout.engines import merging, published  # noqa: E402  needs torch, as all that follows
from rollout.engines.vllm import engine as vllm_engine  # noqa: E402  needs torch
from rollout.engines.vllm import setup  # noqa: E402
from rollout.engines.vllm.engine import VllmEngine  # noqa: E402
from tests.rollout.test_asleep import Llm  # noqa: E402
from tests.rollout.test_engine_adapters import LORA, Trained, _version  # noqa: E402
from tests.rollout.test_engine_contract import GREEDY, finish, request  # noqa: E402

if TYPE_CHECKING:
    from tests.rollout.kinds import Kind
else:
    Kind = kinds.Kind


class Pulled(Trained):
    """Its base lies where a pull left it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.memory = Buffer(self.base.total_nbytes)
        self.memory.view[:] = self.blob

    def version(self, number: int) -> list[Any]:
        adapter = manifests.Adapter(self.base.root, LORA.alpha / LORA.rank, "float32")
        own = _version(
            number, dict(adapters.trained(self.model, adapters.trained_shapes(self.model))), adapter
        )
        return merging.views(own[0], manifests.views(*own), self.base, self.memory.view, self.memory)


def test_base_and_adapters_are_taken_apart_and_the_base_is_known_again_where_it_lies() -> None:
    trained = Pulled(kinds.Reference())
    trained.step(1)
    first = trained.version(2)
    trained.step(2)
    base, mine = merging.apart(first)
    other, _ = merging.apart(trained.version(3))
    assert len(mine) == 2 * 7
    assert [weight.name for weight in base] == [weight.name for weight in first]
    for weight, whole in zip(base, manifests.views_in(trained.base, trained.memory), strict=True):
        assert torch.equal(merging.on(weight, "cpu"), merging.tensor(whole))
    assert merging.same_memory(base, other)
    trained.memory = Buffer(trained.base.total_nbytes)
    trained.memory.view[:] = trained.blob
    assert not merging.same_memory(base, merging.apart(trained.version(4))[0]), (
        "pulled again, to other memory"
    )
    copied, _ = merging.apart(trained.merged_by_engine())
    assert not merging.same_memory(copied, copied), "nobody knows where that lies"


def engine_of(llm: Any, rank: int = LORA.rank) -> VllmEngine:
    kind = kinds.Reference()
    spec = msgspec.structs.replace(kind.spec(), adapter_rank=rank)
    layout = published.layout(published.parse_config(kind.text()))
    return VllmEngine(spec, EngineHost("run"), llm, layout, None, None)  # type: ignore[arg-type]  # Llm stands for vLLM's


class Adapting(Llm):  # type: ignore[misc]  # of a module that is imported only where torch is: Any
    """`lacks`: layers that it has no place for. `begun`: set when adapters come, which are then never put in place; None: they are."""

    lacks = 0
    begun: asyncio.Event | None = None

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.kept: list[list[int]] = []  # numbers that were to stay

    async def collective_rpc(self, name: str, timeout: float, args: tuple[Any, ...] = ()) -> list[Any]:
        if name == "scavenger_drop_adapters":
            self.calls.append(name)
            self.kept.append(args[0])
            return [None]
        if name != "scavenger_adapt":
            found: list[Any] = await super().collective_rpc(name, timeout, args)
            return found
        self.calls.append(name)
        _, rows, scale, number, keep = args
        self.kept.append(keep)
        assert scale == LORA.alpha / LORA.rank
        self.numbers.append(number)
        if self.begun is not None:
            self.begun.set()
            await asyncio.Event().wait()
        return [len(rows) - self.lacks]


def test_one_base_is_loaded_once_and_adapters_have_a_number_of_their_own_each_time() -> None:
    async def main() -> None:
        llm, trained = Adapting(), Pulled(kinds.Reference())
        engine = engine_of(llm)
        for seed in (1, 2):
            trained.step(seed)
            assert await engine.load(seed + 1, trained.version(seed + 1)) == b""
            assert llm.calls[-3:] == ["scavenger_wipe", "reset_prefix_cache", "resume_generation"]
        assert (llm.calls.count("scavenger_load"), llm.numbers) == (1, [1, 2])
        await engine.sleep()
        await engine.wake()
        assert llm.numbers == [1, 2, 3], "what slept is put in anew from what was verified"
        await engine.sleep()
        trained.step(3)
        await engine.load(4, trained.version(4))
        assert llm.numbers == [1, 2, 3], "the GPU is the trainer's"
        await engine.wake()
        assert (llm.calls.count("scavenger_load"), llm.numbers) == (1, [1, 2, 3, 4])
        whole = await engine.load(5, kinds.Reference().views, summed=True)
        assert whole, "all weights, and no adapters beside them"
        assert engine._lora is None
        assert llm.calls.count("scavenger_load") == 2

    asyncio.run(main())


def test_a_layer_that_vllm_has_no_place_for_is_refused() -> None:
    async def main() -> None:
        llm, trained = Adapting(), Pulled(kinds.Reference())
        llm.lacks = 3
        with pytest.raises(EngineError, match="adapters for 14 layers, and vLLM has a place for 11 of them"):
            await engine_of(llm).load(2, trained.version(2))

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_borrower_whose_adapters_do_not_get_in_stops_no_sample_of_the_lender(leaves: bool) -> None:
    async def main() -> None:
        llm, trained = Adapting(), Pulled(kinds.Reference())
        engine = engine_of(llm)
        trained.step(1)
        await engine.load(2, trained.version(2))
        trained.step(2)
        del llm.calls[:]
        if leaves:
            llm.begun = asyncio.Event()
            loading = asyncio.create_task(engine.load_beside(1, trained.version(3)))
            await llm.begun.wait()
            loading.cancel()
            await asyncio.wait((loading,))
            assert loading.cancelled()
        else:
            llm.lacks = 3
            with pytest.raises(EngineError, match="vLLM has a place for 11 of them"):
                await engine.load_beside(1, trained.version(3))
        stop, drop, go = "pause_generation", "scavenger_drop_adapters", "resume_generation"
        assert [call for call in llm.calls if call in (stop, drop, go)] == [stop, drop, go]
        assert llm.kept[-1] == [1], "the lender's alone"
        assert engine.borrowers() == frozenset()

    asyncio.run(main())


def test_a_lender_s_version_that_does_not_fit_stops_no_sample_of_the_borrower() -> None:
    async def main() -> None:
        llm, trained = Adapting(), Pulled(kinds.Reference())
        engine = engine_of(llm)
        trained.step(1)
        await engine.load(2, trained.version(2))
        await engine.load_beside(1, trained.version(2))
        llm.lacks = 3
        del llm.calls[:]
        with pytest.raises(EngineError, match="vLLM has a place for 11 of them"):
            await engine.load(3, trained.version(3))
        assert llm.calls[-1] == "resume_generation"
        assert engine.borrowers() == {1}

    asyncio.run(main())


def test_samples_of_a_borrower_are_taken_while_the_lender_loads_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def waits(*_of: object) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        llm, trained = Adapting(), Pulled(kinds.Reference())
        engine = engine_of(llm)
        monkeypatch.setattr(vllm_engine, "params_of", lambda *_of: None)
        monkeypatch.setattr(engine, "_stream", waits)
        trained.step(1)
        await engine.load(2, trained.version(2))
        await engine.load_beside(1, trained.version(2))
        llm.begun = asyncio.Event()
        loading = asyncio.create_task(engine.load(3, trained.version(3)))
        await llm.begun.wait()
        with pytest.raises(EngineError, match="holds no weights"):
            await engine.add(request(1))
        await engine.add_beside(1, request(2))
        assert set(engine._streams) == {2}
        loading.cancel()
        await engine.abort([2])
        await asyncio.wait((loading,))

    asyncio.run(main())


def test_what_a_borrower_s_load_lacks_lets_all_others_go_on_and_its_base_is_summed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    summed = []
    digest = merging.digest
    monkeypatch.setattr(merging, "digest", lambda *given: summed.append(0) or digest(*given))

    async def main() -> None:
        llm, hers, his = Adapting(), Pulled(kinds.Reference()), Pulled(kinds.Reference())
        engine = engine_of(llm)
        await engine.load(2, hers.version(2))
        for number, due in ((2, 1), (3, 1)):
            await engine.load_beside(1, his.version(number))
            assert (llm.calls[-1], len(summed)) == ("resume_generation", due)
        llm.lacks = 3
        with pytest.raises(EngineError, match="vLLM has a place for 11 of them"):
            await engine.load_beside(1, his.version(4))
        assert llm.calls[-1] == "resume_generation", "whatever was paused goes on"
        assert not engine.borrowers()
        llm.lacks = 0
        await engine.load(5, kinds.Reference().views)
        await engine.load(6, hers.version(6))
        await engine.load_beside(1, his.version(5))
        assert (len(summed), engine.borrowers()) == (2, {1})

    asyncio.run(main())


class Generating(Adapting):
    """Its requests go on until they are aborted. `nan`: the first token of each has no finite logprob."""

    nan = False

    async def generate(
        self, _prompt: object, _params: object, name: str, **_how: object
    ) -> AsyncIterator[Any]:
        try:
            while self.nan:
                found = SimpleNamespace(logprobs=[math.nan])
                one = SimpleNamespace(token_ids=(1,), logprobs=found, finish_reason=None)
                yield SimpleNamespace(outputs=[one])
            await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.calls.append("abort")
            raise


PAUSE, WIPE, FORGET, GO = "pause_generation", "scavenger_wipe", "reset_prefix_cache", "resume_generation"
DROP, ADAPT = "scavenger_drop_adapters", "scavenger_adapt"


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ends", "due"),
    [
        ("drop", [PAUSE, "abort", DROP, WIPE, FORGET, GO]),
        ("load", [PAUSE, "abort", WIPE, FORGET, GO, PAUSE, ADAPT, GO]),
        ("refused", [PAUSE, "abort", WIPE, FORGET, GO]),
    ],
)
def test_nothing_is_computed_between_the_end_of_a_borrower_s_sample_and_the_wipe_of_what_it_left(
    ends: str, due: list[str]
) -> None:
    async def main() -> None:
        llm, hers, his = Generating(), Pulled(kinds.Reference()), Pulled(kinds.Reference())
        engine = engine_of(llm)
        await engine.load(2, hers.version(2))
        await engine.load_beside(1, his.version(2))
        await engine.add(request(1))
        await engine.add_beside(1, request(2))
        await asyncio.sleep(0)
        del llm.calls[:]
        if ends == "drop":
            await engine.drop(1)
        elif ends == "load":
            await engine.load_beside(1, his.version(3))
        else:
            his.memory, blob = Buffer(his.base.total_nbytes), bytearray(his.blob)
            blob[3] ^= 1
            his.memory.view[:] = blob
            with pytest.raises(EngineError, match="another base"):
                await engine.load_beside(1, his.version(3))
        assert llm.calls == due
        assert set(engine._streams) == {1}, "hers goes on"
        assert engine.borrowers() == ({1} if ends == "load" else frozenset())
        await engine.abort([1])

    asyncio.run(main())


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_a_sample_that_met_nan_is_ended_while_nothing_is_computed() -> None:
    async def main() -> None:
        llm, hers = Generating(), Pulled(kinds.Reference())
        engine = engine_of(llm)
        await engine.load(2, hers.version(2))
        del llm.calls[:]
        llm.nan = True
        await engine.add(request(1))
        (delta,) = await engine.next()
        assert "not finite" in (delta.error or "")
        assert llm.calls[:5] == [PAUSE, "abort", WIPE, FORGET, GO]

    asyncio.run(main())


def test_vllm_is_asked_for_the_least_rank_that_it_has_room_for() -> None:
    kind = kinds.Vllm()
    _, _, config = setup.checked_config(kind.spec())

    def given(rank: int) -> dict[str, Any]:
        spec = msgspec.structs.replace(kind.spec(), adapter_rank=rank)
        found: dict[str, Any] = setup.arguments(spec, EngineHost("run"), Path("/f"), config, True)
        return found

    assert [given(rank)["max_lora_rank"] for rank in (1, 2, 16, 17, 512)] == [1, 8, 16, 32, 512]
    assert "enable_lora" not in given(0)
    with pytest.raises(EngineError, match="vLLM keeps no adapters of rank 513"):
        given(513)


def test_vllm_has_room_for_a_borrower_s_adapters_only_where_its_engine_may_lend() -> None:
    kind = kinds.Vllm()
    _, _, config = setup.checked_config(kind.spec())
    for shared, sleeps, runs in ((True, False, 2), (True, True, 1), (False, False, 1)):
        spec = msgspec.structs.replace(kind.spec(), adapter_rank=8, shared=shared)
        found = setup.arguments(spec, EngineHost("run", sleeps=sleeps), Path("/f"), config, True)
        assert (found["max_loras"], found["max_cpu_loras"]) == (runs, runs)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpus", [1, 2])
def test_tokens_are_those_of_merged_weights_also_after_a_move_and_a_new_version(gpus: int) -> None:
    from rollout.engines.vllm import engine as vllm
    from tests.rollout.test_tensor_parallel import Wide

    kind: Any = Wide()
    trained = Pulled(kind)
    beside = msgspec.structs.replace(kind.spec(), adapter_rank=LORA.rank)

    async def main() -> None:
        merged, unmerged = (
            await vllm.build(kind.spec(), EngineHost("run")),
            await vllm.build(beside, EngineHost("run", gpus)),
        )
        try:
            answers = []
            for seed in (1, 2):
                trained.step(seed)
                views = trained.version(seed + 1)
                await merged.load(seed + 1, views)
                await unmerged.load(seed + 1, views)
                one = await finish(merged, *(request(i, GREEDY) for i in range(4)))
                two = await finish(unmerged, *(request(i, GREEDY) for i in range(4)))
                for handle, delta in one.items():
                    assert two[handle].token_ids == delta.token_ids
                    pairs = zip(two[handle].raw_logprobs, delta.raw_logprobs, strict=True)
                    assert max(abs(a - b) for a, b in pairs) < 1e-4
                answers.append({handle: delta.token_ids for handle, delta in two.items()})
                # A sample that was moved goes on as if it had stayed, whichever engine it comes from.
                head = answers[-1][1][:5]
                for engine in (merged, unmerged):
                    rest = await finish(engine, request(1, GREEDY, accepted=head))
                    assert head + rest[1].token_ids == answers[-1][1]
            assert answers[0] != answers[1]
            # A version that comes while a sample is generated ends it here: no token of it is of the new one.
            long = Sampling(100, temperature=0.0)
            await unmerged.add(request(0, long))
            before = (await unmerged.next())[0].token_ids
            assert before[:5] == answers[1][0][: len(before)][:5]
            trained.step(3)
            views = trained.version(4)
            await unmerged.load(4, views)
            await merged.load(4, views)
            assert not unmerged._ready
            left, right = [
                (await finish(engine, request(0, GREEDY, accepted=before)))[0].token_ids
                for engine in (merged, unmerged)
            ]
            assert left == right, "it goes on under the new version, as anywhere else"
        finally:
            await merged.close()
            await unmerged.close()

    asyncio.run(main())
