"""An engine that changes hands: nothing of the run that it leaves stays in it, and the next run gets what a fresh engine would give it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import pytest
from msgspec import structs

from scavenger.errors import EngineError
from scavenger.protocol.messages import EngineSpec, SampleKey, Sampling
from scavenger.protocol.worker.events import GroupName, HearSiblings, Request, SiblingSaid

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
kinds = pytest.importorskip("tests.rollout.kinds")
contract = pytest.importorskip("tests.rollout.test_engine_contract")
decoder = pytest.importorskip("rollout.engines.decoder")
reference = pytest.importorskip("rollout.engines.reference")
if TYPE_CHECKING:
    from tests.rollout.kinds import Kind
else:
    Kind = kinds.Kind

GREEDY = Sampling(max_tokens=24, temperature=0.0)
#: What no other text in a process has by chance.
SECRET = (3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7)


def beneath(engine: Any) -> Any:
    """What the engine is around: what stays in a process is seen from within alone."""
    return engine._engine


def of_first_run(handle: int, max_tokens: int = 64) -> Request:
    key = SampleKey("train", 0, 0, handle)
    sampling = Sampling(max_tokens=max_tokens)
    return Request(handle, SECRET, (), max_tokens, sampling, 11, key)


async def under_way(engine: Any, views: Any) -> None:
    """The engine in the middle of a run's samples: some run, some wait, siblings were heard."""
    await engine.load(7, views)
    for handle in range(6):
        await engine.add(of_first_run(handle))
    for _ in range(3):
        await engine.next()
    group = GroupName(SampleKey("train", 0, 0, 0), SECRET)
    await engine.hear(HearSiblings((SiblingSaid(group, 9, 0, SECRET),)))
    await engine.next()
    await engine.hear(HearSiblings((SiblingSaid(group, 10, 0, SECRET),)))
    await engine.add(of_first_run(6))


@kinds.EVERY_LONG
def test_after_a_change_of_hands_an_engine_gives_what_a_fresh_one_gives(kind: Kind) -> None:
    async def main() -> None:
        theirs = models.views(models.plain_model(kind.text(), seed=5))
        fresh = await contract.loaded(kind, views=theirs)
        due = await contract.finish(fresh, *(contract.request(i, GREEDY) for i in range(4)))
        await fresh.close()
        engine = await kind.start(kind.spec())
        await under_way(engine, kind.views)
        await engine.forget("theirs")
        with pytest.raises(EngineError, match="holds no weights"):
            await engine.add(contract.request(0, GREEDY))
        await engine.load(1, theirs)
        assert engine.progress() == 0
        # The first run's numbers are given again: nothing of its requests may be told under them.
        found = await contract.finish(
            engine, *(contract.request(i, GREEDY) for i in range(4)), never=(4, 5, 6)
        )
        contract.same(kind, found, due)
        await engine.forget("third")
        with pytest.raises(EngineError, match="holds no weights"):
            await engine.add(contract.request(0, GREEDY))
        await engine.load(1, kind.views)  # as its next user, who finds it kept for the session, expects it
        await engine.close()

    kind.run(main())


@kinds.VLLM_ONLY_LONG
@pytest.mark.parametrize("more", [{"speculation": "group"}, {"move_kv": True}, {"adapter_rank": 8}], ids=str)
def test_vllm_forgets_drafts_moved_blocks_and_adapters_too(kind: Kind, more: dict[str, Any]) -> None:
    mine = kind.views
    if "adapter_rank" in more:
        pytest.importorskip("peft", reason="the adapters need the [lora] extra")
        from tests.rollout.test_adapters_unmerged import Pulled

        trained = Pulled(kind)
        trained.step(1)
        mine = trained.version(7)

    async def main() -> None:
        theirs = models.views(models.plain_model(kind.text(), seed=5))
        spec = structs.replace(kind.spec(), **more)
        engine = await kind.start(spec)
        await engine.load(1, theirs)
        due = await contract.finish(engine, *(contract.request(i, GREEDY) for i in range(4)))
        await under_way(engine, mine)
        assert (beneath(engine).bare._lora is not None) == ("adapter_rank" in more)
        assert bool(beneath(engine).bare._blocks.texts) == ("move_kv" in more)
        assert bool(beneath(engine).bare._drafts.introduced) == ("speculation" in more)
        await engine.forget("theirs")
        bare = beneath(engine).bare
        assert not any(
            (bare._lora, bare._adapters, bare._blocks.texts, bare._blocks.brought, bare._drafts.introduced)
        )
        await engine.load(1, theirs)
        found = await contract.finish(
            engine, *(contract.request(i, GREEDY) for i in range(4)), never=(4, 5, 6)
        )
        contract.same(kind, found, due)
        await engine.close()

    kind.run(main())


@kinds.VLLM_ONLY_LONG
def test_vllm_holds_zeros_after_a_change_of_hands(kind: Kind) -> None:
    async def main() -> None:
        engine = await kind.start(kind.spec())
        bare = beneath(engine).bare
        await under_way(engine, kind.views)
        (before,) = await bare._llm.collective_rpc("scavenger_held")
        await engine.forget("theirs")
        (after,) = await bare._llm.collective_rpc("scavenger_held")
        assert any(value != "0" for value, _, _ in before.values())
        assert {name: value for name, (value, _, _) in after.items() if value != "0"} == {}
        assert bare._host.run == "theirs"
        assert not any((bare._streams, bare._blocks.texts, bare._routes, bare._ready, bare._held))
        await engine.load(1, kind.views)
        await engine.close()

    kind.run(main())


# ---------------------------------------------------------------- what stays, looked for in all that the engine reaches


def reached(root: object) -> Iterator[tuple[str, object]]:
    """Everything of ours, and every container and tensor, that an engine reaches, with the way to it."""
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [("engine", root)]
    while todo:
        way, one = todo.pop()
        if id(one) in seen and not _is_text(one):  # of a text every place is told
            continue
        seen.add(id(one))
        yield way, one
        if isinstance(one, dict):
            todo += [(f"{way}[{key!r}]"[-200:], value) for key, value in one.items()]
            todo += [(f"{way} key", key) for key in one]
        elif isinstance(one, list | tuple | set | frozenset):
            todo += [(f"{way}[{i}]", value) for i, value in enumerate(one)]
        elif isinstance(one, torch.nn.Module | torch.Tensor) or type(one).__module__.startswith("rollout"):
            names = getattr(one, "__dict__", {}).keys() | set(_slots(type(one)))
            todo += [(f"{way}.{name}", getattr(one, name)) for name in sorted(names) if hasattr(one, name)]
        elif type(one).__module__ == "collections" or type(one).__module__.startswith("scavenger"):
            todo += [(f"{way}~{type(child).__name__}", child) for child in gc.get_referents(one)]


def _is_text(one: object) -> TypeGuard[list[int] | tuple[int, ...]]:
    return isinstance(one, list | tuple) and bool(one) and all(type(item) is int for item in one)


def _slots(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if name != "__weakref__"]


def residue(engine: object) -> list[str]:
    """Where the first run's tokens still are, and weights or cache entries that are not zero."""
    found = []
    cache = beneath(engine)._decoder._cache
    state = beneath(engine)._decoder._model.state_dict()
    found += [f"weight {name}" for name, tensor in state.items() if tensor.count_nonzero()]
    found += ["cache" for tensor in (*cache._keys, *cache._values) if tensor.count_nonzero()]
    for way, one in reached(engine):
        if _is_text(one) and _holds(one, SECRET[:6]):
            found.append(way)
        if isinstance(one, Request):
            found.append(way)
    return found


def _holds(text: list[int] | tuple[int, ...], part: tuple[int, ...]) -> bool:
    n = len(part)
    return any(tuple(text[i : i + n]) == part for i in range(len(text) - n + 1))


def speculating(kind: Kind) -> EngineSpec:
    return structs.replace(kind.spec(max_batch=4), speculation="group")


def after_forgetting(kind: Kind) -> list[str]:
    async def main() -> list[str]:
        engine = await kind.start(speculating(kind))
        await under_way(engine, kind.views)
        stale = beneath(engine)._decoder._cache
        before = residue(engine)
        assert any(name.startswith("weight") for name in before), "the search finds nothing at all"
        assert any("_speculator" in name for name in before)
        assert any("_heard" in name for name in before)
        assert "cache" in before
        await engine.forget("theirs")
        # The old cache's own memory too: what is only given back may lie there for whoever gets it next.
        left = ["old cache" for tensor in (*stale._keys, *stale._values) if tensor.count_nonzero()]
        found = residue(engine) + left
        assert engine.speculated() == type(engine.speculated())()
        await engine.close()
        return found

    return asyncio.run(main())


@kinds.REFERENCE_ONLY
def test_nothing_of_the_old_run_is_reachable_in_the_engine(kind: Kind) -> None:
    assert after_forgetting(kind) == []


@dataclasses.dataclass(frozen=True)
class Plant:
    """A part of forgetting that is left out."""

    where: Any
    name: str
    instead: Any
    shows: str


def _keep_speculator(self: Any) -> Any:
    return getattr(self, "_speculator", None) or decoder.Speculator()


PLANTS = [
    Plant(decoder.SlotCache, "wipe_all", lambda _self: None, "old cache"),
    Plant(decoder.Decoder, "_new_speculator", _keep_speculator, "_speculator"),
    Plant(torch.Tensor, "zero_", lambda self: self, "weight"),
    Plant(decoder.Decoder, "clear", lambda _self: None, "_rows"),
    Plant(reference.ReferenceEngine, "_forget_all", lambda _self: None, "_joining"),
]


@kinds.REFERENCE_ONLY
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_what_is_not_forgotten_is_found(kind: Kind, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    forget = decoder.Decoder.forget

    def planted(self: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plant.where, plant.name, plant.instead)
            forget(self)

    if plant.where is reference.ReferenceEngine:
        monkeypatch.setattr(plant.where, plant.name, plant.instead)
    else:
        monkeypatch.setattr(decoder.Decoder, "forget", planted)
    if plant.name == "_new_speculator":  # one that counts would be told apart by its counts alone
        monkeypatch.setattr(reference.ReferenceEngine, "speculated", lambda _self: decoder.Speculated())
    assert any(plant.shows in way for way in after_forgetting(kind))
