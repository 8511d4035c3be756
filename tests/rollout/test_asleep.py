"""A vLLM engine that sleeps: what it held, or what came meanwhile, is what it finds at the wake, or it ends. And what it refuses.

On a CPU vLLM does not sleep, so its end of the port is played here: the calls that the engine makes of it, answered as `vllm_worker` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scavenger.errors import EngineError, WeightsDiffer
from scavenger.protocol.messages import SampleKey, Sampling
from scavenger.protocol.worker.events import Request

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
pytest.importorskip("peft", reason="the adapters need the [lora] extra")
kinds = pytest.importorskip("tests.rollout.kinds")
from rollout.engines import account, merging, published, slices  # noqa: E402  needs torch, as all that follows
from rollout.engines.base import EngineHost  # noqa: E402
from rollout.engines.checksum import checksum  # noqa: E402
from rollout.engines.registry import builder  # noqa: E402
from rollout.engines.vllm.engine import VllmEngine  # noqa: E402
from rollout.engines.vllm.worker import Extension, _encoded, mapped  # noqa: E402
from tests.rollout.test_engine_adapters import Trained  # noqa: E402


class Llm:
    """What `VllmEngine` calls of vLLM's engine to sleep, wake and load.

    `damage`: of what it reads from the memory file; `misplaces`: what it holds is not what it read.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.damage = self.misplaces = False
        self.held: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        async def call(*_args: object, **_how: object) -> None:
            self.calls.append(name)

        return call

    async def collective_rpc(self, name: str, _timeout: float, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(name)
        if name == "scavenger_held":
            return [self.held]
        if name == "scavenger_probe":
            return [{weight: [slices.whole(shape)] for weight, shape in args[0].items()}]
        if name != "scavenger_load":
            return [None]
        paths, table, merges, _version = args
        files = [mapped(path) for path in paths]
        sums = {}
        for weight, *row in table:
            whole = [slices.whole(row[1])]
            value = merging.from_files(files, tuple(row), merges.get(weight), whole, "cpu").clone()
            if self.damage and weight.endswith("q_proj.weight"):
                value[0, 0] += 1
            sums[weight] = _encoded(checksum(value))
        self.held = dict(sums)
        if self.misplaces:
            self.flip()
        return [(sums, self.held, {}, sums, self.held)]

    def flip(self) -> None:
        """One weight of those that it holds is another one."""
        name = min(self.held)
        self.held = self.held | {name: _encoded(checksum(torch.ones(self.held[name][1])))}


class Answering(Llm):
    """One that ends each request at once."""

    asked = 0

    async def generate(self, *_args: object, **_how: object) -> AsyncIterator[Any]:
        self.asked += 1
        ended = SimpleNamespace(token_ids=(), logprobs=None, finish_reason="length")
        yield SimpleNamespace(outputs=[ended])


def engine_of(llm: Llm, host: EngineHost = EngineHost("run")) -> VllmEngine:  # noqa: B008  frozen
    kind = kinds.Reference()
    config = published.parse_config(kind.text())
    return VllmEngine(kind.spec(), host, llm, published.layout(config), None, None)  # type: ignore[arg-type]  # Llm stands for vLLM's


@pytest.mark.parametrize("damage", [False, True])
def test_what_comes_while_it_sleeps_is_summed_then_and_must_be_found_at_the_wake(damage: bool) -> None:
    async def main() -> None:
        llm, trained = Llm(), Trained(kinds.Reference())
        engine = engine_of(llm)
        trained.step(1)
        await engine.sleep()
        assert await engine.load(2, trained.merged_by_engine(), summed=True) == trained.digest()
        assert "scavenger_load" not in llm.calls, "the GPU is the trainer's"
        llm.damage = damage
        if damage:
            with pytest.raises(EngineError, match="version 2 was merged once more, and came out otherwise"):
                await engine.wake()
            assert "resume_generation" not in llm.calls, "nothing is generated with it"
        else:
            await engine.wake()
            assert llm.calls.index("scavenger_load") < llm.calls.index("resume_generation")
            assert await engine.load(2, trained.merged_by_engine(), summed=True) == trained.digest(), (
                "awake, the same"
            )

    asyncio.run(main())


def test_a_tied_weight_counts_under_the_name_under_which_it_was_published() -> None:
    text = kinds.Reference().text(tie_word_embeddings=True)
    layout = published.layout(published.parse_config(text))
    (tied,) = [names for names in layout.tied if len(names) > 1]
    views = {view.name: view for view in kinds.Reference().views}
    given = [view for name, view in views.items() if name not in tied]
    for name in tied:
        one = type(given[0])(name, "float32", layout.shapes[name], memoryview(bytes(4)))
        assert published.names(layout, [*given, one])[tied[0]] == name


@pytest.mark.parametrize("damage", [False, True])
def test_a_wake_without_a_new_version_finds_what_went_to_sleep(damage: bool) -> None:
    async def main() -> None:
        llm = Llm()
        engine = engine_of(llm)
        await engine.load(1, kinds.Reference().views)
        llm.calls.clear()
        await engine.sleep()
        if damage:
            llm.flip()
            with pytest.raises(WeightsDiffer, match="version 1 did not come out of sleep as it went into it"):
                await engine.wake()
            assert "resume_generation" not in llm.calls, "nothing is generated with it"
        else:
            await engine.wake()
            assert (
                llm.calls.index("wake_up")
                < llm.calls.index("scavenger_held")
                < llm.calls.index("resume_generation")
            )

    asyncio.run(main())


def test_an_engine_without_weights_has_nothing_to_compare_when_it_wakes() -> None:
    async def main() -> None:
        llm = Llm()
        engine = engine_of(llm)
        await engine.sleep()
        await engine.wake()
        assert "scavenger_held" not in llm.calls

    asyncio.run(main())


def test_weights_that_do_not_sit_in_the_engine_as_published_are_told_from_those_that_do_not_fit() -> None:
    """By the error's type the worker knows that its node may be at fault, looks at what it holds, and ends at the second time."""

    async def main() -> None:
        llm = Llm()
        llm.misplaces = True
        with pytest.raises(
            WeightsDiffer, match=r"version 1 does not sit in the engine as published: .* does not hold"
        ):
            await engine_of(llm).load(1, kinds.Reference().views)
        assert "resume_generation" not in llm.calls

    asyncio.run(main())


@pytest.mark.parametrize("damage", [False, True])
def test_a_reserved_reference_engine_finds_its_weights_again_or_ends(damage: bool) -> None:
    async def main() -> None:
        kind = kinds.Reference()
        engine = await builder(kind.name)(kind.spec(), EngineHost("run", sleeps=True))
        await engine.load(1, kind.views)
        await engine.sleep()
        if damage:
            parameter = next(iter(engine._engine._decoder._model.parameters()))  # type: ignore[attr-defined]
            parameter.view(-1)[0] += 1.0
            with pytest.raises(WeightsDiffer, match="did not come out of sleep as they went into it"):
                await engine.wake()
        else:
            await engine.wake()
        await engine.close()

    asyncio.run(main())


def test_each_rank_of_an_engine_takes_its_part_of_its_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of two GPUs: that of the second rank has no room for what only that rank takes."""

    class Wide(Llm):
        engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[])))

        async def collective_rpc(self, name: str, _timeout: float, args: tuple[Any, ...] = ()) -> list[Any]:
            if name == "scavenger_bytes_taken":
                return [{"weights": 300}, {"weights": 500}]
            return await super().collective_rpc(name, _timeout, args)

    path = account.create(tmp_path / "gpu", 1000)
    monkeypatch.setenv(account.VARIABLE, str(path))
    monkeypatch.setenv("SCAVENGER_SLOT", "1")
    monkeypatch.setenv("SCAVENGER_GPUS", "2")
    rank = account.Shared(path, 3, "rank 3")

    async def main() -> None:
        engine = engine_of(Wide(), EngineHost("run", gpus=2, sleeps=True))
        await engine.prepare()
        assert [(row.gpu, row.nbytes) for row in rank.table()] == [(2, 300), (3, 500)]
        assert await engine.bytes_held() == [300, 500]
        await engine.sleep()
        rank.take("weights", 600)
        with pytest.raises(
            EngineError, match=r"(?s)the GPU's memory is not free: GPU 3 .*rank 3 .*= weights 600"
        ):
            await engine.wake()

    asyncio.run(main())


def test_the_account_of_a_shared_gpu_has_what_it_takes_awake_and_nothing_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of a GPU. A wake that the trainer has left no room for is an error of the engine, with both parties' tables."""

    class Sized(Llm):
        engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[])))

        async def collective_rpc(self, name: str, _timeout: float, args: tuple[Any, ...] = ()) -> list[Any]:
            if name == "scavenger_bytes_taken":
                runner = SimpleNamespace(
                    get_model=lambda: torch.nn.Linear(10, 4),
                    kv_caches=[torch.zeros(50), [torch.zeros(5), torch.zeros(5)]],
                )
                return [Extension.scavenger_bytes_taken(SimpleNamespace(model_runner=runner))]  # type: ignore[arg-type]
            return await super().collective_rpc(name, _timeout, args)

    path = account.create(tmp_path / "gpu", 1000)
    monkeypatch.setenv(account.VARIABLE, str(path))
    monkeypatch.setenv("SCAVENGER_SLOT", "0")
    trainer = account.Shared(path, 0, "rank 0")

    async def main() -> None:
        engine = engine_of(Sized(), EngineHost("run", sleeps=True))
        await engine.prepare()
        held = {row.purpose: row.nbytes for row in trainer.table()}
        assert held == {"weights": 4 * 44, "cache": 4 * 60}
        assert await engine.bytes_held() == [4 * 104]
        await engine.sleep()
        assert await engine.bytes_held() == [0]
        trainer.take("weights", 900)
        with pytest.raises(EngineError, match=r"(?s)the GPU's memory is not free: .*rank 0 .*= weights 900"):
            await engine.wake()
        trainer.give("weights", 900)
        await engine.wake()
        assert await engine.bytes_held() == [4 * 104]

    asyncio.run(main())
    assert account.Shared(path, 0, "rank 1").own() == 0


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(4, temperature=2.5), "does not take temperature 2.5"),
        (Sampling(4, top_p=0.0), "does not take temperature 1.0, top_p 0.0"),
        (Sampling(4, stop_token_ids=(1, 1_000_000)), "a stop token id lies outside"),
    ],
)
def test_what_vllm_would_not_take_is_refused_alone_and_the_engine_goes_on(
    sampling: Sampling, said: str
) -> None:
    pytest.importorskip("vllm")

    async def main() -> None:
        llm = Answering()
        engine = engine_of(llm)
        await engine.load(1, kinds.Reference().views)
        good = Request(1, (3, 1), (), 4, Sampling(4, temperature=2.0), 0, SampleKey("turn", 1, 1, 0))
        with pytest.raises(EngineError, match=said):
            await engine.add(replace(good, handle=2, sampling=sampling))
        await engine.add(good)
        [delta] = await asyncio.wait_for(engine.next(), 10)
        assert (delta.handle, delta.finish, llm.asked) == (1, "length", 1), "the other one never came to vLLM"

    asyncio.run(main())
