"""Adapters on their way: the trainer publishes its base once and A and B at each step; every engine ends with the trainer's own weights.

The sources, pulls and engines are the real ones; between them stands no daemon (`tests/router/test_weights_holders.py` has that side).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rollout.engines import checksum, lora, merging
from rollout.engines.base import EngineHost
from rollout.engines.reference import ReferenceEngine, build
from scavenger.errors import EngineError, WeightsError
from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights.engine_store import Store
from scavenger.weights.manifest import Manifest
from scavenger.weights.source import WeightServer
from tests.trainer.test_lora import RANK, learner_of, trained
from trainer.loop.comm import Solo
from trainer.loop.publish import DTYPES, Publisher
from trainer.loop.ranks import Ranks
from trainer.model import adapters
from trainer.model.learner import Learner


class Trainer:
    """A learner of adapters that publishes over a real source, and the daemon's word about it."""

    def __init__(self, folder: Path, mesh: DeviceMesh, source: WeightServer, dtype: str) -> None:
        self.learner: Learner = learner_of(folder, mesh)
        self.ranks = Ranks(Solo(), self.learner, Publisher(source))
        self.dtype = dtype
        self.base: messages.BaseWeights | None = None

    def publish_base(self, version: int) -> Manifest:
        made = self.ranks.build_base(version)
        self.base = messages.BaseWeights(version, manifests.encode(made), self.ranks.offer(made))
        return made

    def publish(self, version: int) -> messages.UseWeights:
        made = self.ranks.build_version(version, self.dtype)
        return messages.UseWeights(version, manifests.encode(made), self.ranks.offer(made), base=self.base)

    def weights(self) -> dict[str, Tensor]:
        """Merged by the trainer, as they were published before engines merged."""
        found = adapters.merged(self.learner.model, self.learner.shapes(base=True))
        return {name: value.to(DTYPES[self.dtype]) for name, value in found}


class Engine:
    """What `rollout.worker` does with an order to load: the base first where it lacks it, then the adapters, then the engine."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.engine = engine
        self.said: list[messages.Serving] = []
        self.store = Store(keys.generate(), self.said.append, lambda: "127.0.0.1")

    async def load(self, weights: messages.UseWeights) -> None:
        manifest = manifests.decode(weights.manifest)
        base = await self.store.get_base(manifest, weights, 20.0)
        blob = await self.store.get(manifest, msgspec.structs.replace(weights, keep=(base[0].version,)), 20.0)
        views = merging.views(manifest, manifests.views(manifest, blob.view), base[0], base[1].view)
        assert manifest.merged, "the trainer says what it makes of them"
        merging.refuse_other(manifest, await self.engine.load(manifest.version, views, summed=True))

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.engine._decoder._model.named_parameters()}


@asynccontextmanager
async def engine_of(folder: Path, dtype: str) -> AsyncIterator[Engine]:
    spec = messages.EngineSpec("reference", (folder / "config.json").read_text(), dtype, 4, 24)
    one = Engine(await build(spec, EngineHost()))
    try:
        yield one
    finally:
        one.store.close()
        await one.engine.close()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


def test_engines_merge_to_the_trainer_s_own_bits_also_one_that_joins_at_version_3(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    async def main(source: WeightServer, dtype: str) -> None:
        trainer = Trainer(model_folder, mesh, source, dtype)
        async with engine_of(model_folder, dtype) as first, engine_of(model_folder, dtype) as joiner:
            base = trainer.publish_base(1)
            for version in (2, 3, 4):
                order = trainer.publish(version)
                await first.load(order)
                assert same(first.weights(), trainer.weights())
                trained(trainer.learner, 1)
            order = trainer.publish(5)
            assert source.versions() == [1, 4, 5], "the base stays, however many versions came"
            await joiner.load(order)
            await first.load(order)
            assert same(joiner.weights(), trainer.weights())
            assert same(first.weights(), trainer.weights())
            assert [said.version for said in joiner.said] == [1, 5], "it serves the base on, as any version"
            adapter = manifests.decode(order.manifest).adapter
            assert adapter is not None
            assert base.root == adapter.base

    for dtype in ("float32", "bfloat16"):
        with WeightServer(local=False) as source:
            asyncio.run(main(source, dtype))


WRONG: dict[str, Any] = {
    "another scale": lambda merged: lambda base, down, up, scale: merged(base, down, up, 0.5 * scale),
    "nothing added": lambda merged: lambda base, down, up, scale: base,
    "rounded early": lambda merged: (
        lambda base, down, up, scale: merged(base, down.bfloat16().float(), up, scale)
    ),
    "one bit of one weight": lambda merged: lambda *given: flipped(merged(*given)),
}


def flipped(value: Tensor) -> Tensor:
    value.view(torch.int32)[0, 0] ^= 1 << 20
    return value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", WRONG)
def test_an_engine_that_merges_wrongly_is_found_out_by_the_trainer_s_own_merge(
    wrong: str, dtype: str, model_folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(source: WeightServer) -> None:
        trainer = Trainer(model_folder, mesh, source, dtype)
        trainer.publish_base(1)
        trained(trainer.learner, 1)
        order = trainer.publish(2)
        async with engine_of(model_folder, dtype) as engine:
            with monkeypatch.context() as planted:
                planted.setattr(lora, "merged", WRONG[wrong](lora.merged))
                with pytest.raises(EngineError, match="version 2 was merged here to other weights"):
                    await engine.load(order)
            await engine.load(order)
            assert same(engine.weights(), trainer.weights())

    with WeightServer(local=False) as source:
        asyncio.run(main(source))


def test_a_weight_that_changed_on_its_way_into_the_engine_is_found_there(
    model_folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Tensor.copy_

    def damages(target: Tensor, source: Tensor) -> Tensor:
        copies(target, source)
        if target.dim() == 2:
            target[1, 1] *= 1 + 2**-40
        return target

    async def main(source: WeightServer) -> None:
        trainer = Trainer(model_folder, mesh, source, "bfloat16")
        trainer.publish_base(1)
        order = trainer.publish(2)
        async with engine_of(
            model_folder, "float64"
        ) as engine:  # wider than what is published: compared in both types
            with monkeypatch.context() as planted:
                planted.setattr(Tensor, "copy_", damages)
                with pytest.raises(EngineError, match="weights do not sit in the engine as they were given"):
                    await engine.load(order)
            await engine.load(order)

    with WeightServer(local=False) as source:
        asyncio.run(main(source))


def test_the_sums_are_those_of_all_weights_whatever_has_an_adapter(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    with WeightServer(local=False) as source:
        trainer = Trainer(model_folder, mesh, source, "bfloat16")
        trainer.publish_base(1)
        found = []
        for version in (2, 3):
            manifest = manifests.decode(trainer.publish(version).manifest)
            assert manifest.merged == checksum.digest(
                {name: checksum.checksum(value) for name, value in trainer.weights().items()}
            )
            found.append(manifest.merged)
            trained(trainer.learner, 1)
        assert found[0] != found[1]


def test_what_is_published_at_a_step_is_a_and_b_and_nothing_else(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    async def main(source: WeightServer) -> None:
        trainer = Trainer(model_folder, mesh, source, "bfloat16")
        base = trainer.publish_base(1)
        layers = [
            name.removesuffix(".weight") for name in trainer.learner.shapes(base=True) if "_proj." in name
        ]
        shapes = trainer.learner.shapes(base=True)
        a_and_b = sum(
            4 * RANK * (shapes[f"{layer}.weight"][0] + shapes[f"{layer}.weight"][1]) for layer in layers
        )
        assert base.total_nbytes == sum(4 * torch.Size(shape).numel() for shape in shapes.values()), (
            "stored in float32, published so"
        )
        async with engine_of(model_folder, "bfloat16") as engine:
            await engine.load(trainer.publish(2))
            for version in (3, 4):
                trained(trainer.learner, 1)
                before = source.stats.nbytes
                order = trainer.publish(version)
                manifest = manifests.decode(order.manifest)
                assert {tensor.name for tensor in manifest.tensors} == {
                    f"{layer}.lora_{side}.weight" for layer in layers for side in "AB"
                }
                assert manifest.total_nbytes == a_and_b
                await engine.load(order)
                assert 0 < source.stats.nbytes - before <= a_and_b, "what travelled"

    with WeightServer(local=False, deltas=0) as source:
        asyncio.run(main(source))


def test_a_trainer_that_restarts_publishes_its_base_again_and_no_engine_pulls_it_twice(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    async def main() -> None:
        async with engine_of(model_folder, "float32") as engine, engine_of(model_folder, "float32") as joiner:
            with WeightServer(local=False) as source:
                trainer = Trainer(model_folder, mesh, source, "float32")
                base = trainer.publish_base(1)
                order = trainer.publish(2)
                await engine.load(order)
            neighbour = next(said.source for said in engine.said if said.version == 1)
            alone = next(said.source for said in engine.said if said.version == 2)
            assert neighbour is not None
            assert alone is not None
            assert order.base is not None
            kept = msgspec.structs.replace(order.base, sources=(neighbour,))
            await joiner.load(
                msgspec.structs.replace(order, sources=(alone,), base=kept)
            )  # while there is no trainer
            assert same(joiner.weights(), trainer.weights())
            with WeightServer(local=False) as source:
                again = Trainer(model_folder, mesh, source, "float32")
                assert again.publish_base(3).root == base.root
                trained(again.learner, 1)
                order = again.publish(4)
                assert order.base is not None
                await engine.load(order)
                assert source.stats.nbytes <= manifests.decode(order.manifest).total_nbytes, (
                    "the base did not travel again"
                )
                assert same(engine.weights(), again.weights())
                assert engine.said[-1].version == 4
                assert {said.version for said in engine.said if said.source is not None} >= {1, 2, 3, 4}

    asyncio.run(main())


def test_another_base_than_the_version_names_is_refused_before_a_byte_is_pulled(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    async def main(source: WeightServer) -> None:
        trainer = Trainer(model_folder, mesh, source, "float32")
        right = trainer.publish_base(1)
        order = trainer.publish(2)
        wrong, blob = manifests.build(3, {"w": ("float32", (4,), memoryview(bytes(16)))})
        other = messages.BaseWeights(3, manifests.encode(wrong), (source.publish(wrong, blob),))
        async with engine_of(model_folder, "float32") as engine:
            with pytest.raises(
                WeightsError,
                match=rf"version 2 is of the base {right.root.hex()}, and what was .* is {wrong.root.hex()}",
            ):
                await engine.load(msgspec.structs.replace(order, base=other))
            with pytest.raises(
                WeightsError, match=rf"version 2 needs the weights of root {right.root.hex()}, and no holder"
            ):
                await engine.load(msgspec.structs.replace(order, base=None))
            assert source.stats.parts == 0
            await engine.load(order)
            assert same(engine.weights(), trainer.weights())

    with WeightServer(local=False) as source:
        asyncio.run(main(source))


def test_adapters_are_not_built_before_their_base(model_folder: Path, mesh: DeviceMesh) -> None:
    with (
        WeightServer(local=False) as source,
        pytest.raises(WeightsError, match="their base was not published"),
    ):
        Trainer(model_folder, mesh, source, "float32").publish(1)


@pytest.mark.parametrize(
    ("stored", "found"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("mixed", "float32")]
)
def test_a_base_is_published_as_it_is_stored(stored: str, found: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    kinds: dict[str, Any] = {
        "mixed": (torch.bfloat16, torch.float32),
        "bfloat16": (torch.bfloat16,) * 2,
        "float32": (torch.float32,) * 2,
    }
    one, two = kinds[stored]
    save_file(
        {"a": torch.zeros(2, dtype=one), "b": torch.zeros(2, dtype=two)}, tmp_path / "model.safetensors"
    )
    assert adapters.stored_dtype(tmp_path) == found


def test_versions_that_nobody_merges_state_no_digest_and_are_the_same_weights(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    with WeightServer() as source:
        trainer = Trainer(model_folder, mesh, source, "float32")
        base = trainer.publish_base(1)
        stated = trainer.ranks.build_version(2, "float32")
        quiet = Ranks(Solo(), trainer.learner, Publisher(source), states_merged=False)
        quiet.build_base(1)
        unstated = quiet.build_version(2, "float32")
        assert base.root == stated.adapter.base == unstated.adapter.base  # type: ignore[union-attr]
        assert (len(stated.merged), unstated.merged) == (manifests.DIGEST_NBYTES, b"")
        assert stated.root == unstated.root, "how engines compute with it is no part of what it is"
