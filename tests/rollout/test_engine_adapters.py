"""Adapters in each engine: what it merges is, to the last bit, what it holds when the trainer merges; from the pristine base each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rollout.engines.base import Engine, Weight
from scavenger.config import LoraSection
from scavenger.errors import EngineError
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
pytest.importorskip("peft", reason="the adapters need the [lora] extra")
models = pytest.importorskip("tests.rollout.models")
kinds = pytest.importorskip("tests.rollout.kinds")
adapters = pytest.importorskip("trainer.model.adapters")
from rollout.engines import merging  # noqa: E402  needs torch, as all that follows
from rollout.engines.checksum import checksum, digest  # noqa: E402
from tests.rollout.test_engine_contract import GREEDY, finish, request  # noqa: E402

if TYPE_CHECKING:
    from tests.rollout.kinds import Kind
else:
    Kind = kinds.Kind
LORA = LoraSection(rank=2, alpha=4.0)  # beside every linear layer of the decoder: vLLM fuses some of them


class Trained:
    """A model with its adapters, as the trainer has it."""

    def __init__(self, kind: Kind) -> None:
        self.base, self.blob = models.weights(kind.model)
        self.model = models.plain_model(kind.text())
        adapters.inject(self.model, LORA)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if ".lora_" in name:
                    value.copy_(torch.randn(value.shape, generator=generator) * 0.3)

    def merged_by_trainer(self) -> list[Weight]:
        return [
            *manifests.views(*_version(3, dict(adapters.merged(self.model, adapters.shapes(self.model)))))
        ]

    def digest(self) -> bytes:
        return digest(
            {
                name: checksum(value)
                for name, value in adapters.merged(self.model, adapters.shapes(self.model))
            }
        )

    def merged_by_engine(self, base: Manifest | None = None) -> list[Weight]:
        adapter = manifests.Adapter(self.base.root, LORA.alpha / LORA.rank, "float32")
        own = _version(2, dict(adapters.trained(self.model, adapters.trained_shapes(self.model))), adapter)
        return merging.views(own[0], manifests.views(*own), base or self.base, memoryview(self.blob))


def _version(
    number: int, tensors: dict[str, Any], adapter: manifests.Adapter | None = None
) -> tuple[Manifest, memoryview]:
    entries = {}
    for name, value in tensors.items():
        raw = bytearray(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        entries[name] = ("float32", tuple(value.shape), memoryview(raw))
    return manifests.build(number, entries, adapter=adapter)


def watch(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The checksum of each parameter that the engine computes with, after each load from now on."""
    inner, seen = engine._engine if hasattr(engine, "_engine") else engine, []
    if hasattr(inner, "_decoder"):
        load = inner._decoder.load

        def loads(tensors: Any, **how: Any) -> Any:
            sums = load(tensors, **how)
            seen.append({name: checksum(value) for name, value in inner._decoder._model.named_parameters()})
            return sums

        monkeypatch.setattr(inner._decoder, "load", loads)
        return seen
    bare = inner.bare
    verify = bare._verify

    def verifies(version: int, answers: Any) -> None:
        verify(version, answers)
        seen.append(answers[0][1])

    monkeypatch.setattr(bare, "_verify", verifies)
    return seen


@kinds.EVERY
def test_merged_by_the_engine_is_merged_by_the_trainer_and_nothing_adds_up(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(kind)

    async def main() -> None:
        engine: Engine = await kind.start(kind.spec())
        seen = watch(engine, monkeypatch)
        answers, digests = [], []
        for seed, views in (
            (1, trained.merged_by_trainer),
            (2, trained.merged_by_engine),
            (1, trained.merged_by_engine),
        ):
            trained.step(seed)
            digests.append(await engine.load(2, views(), summed=True))
            assert digests[-1] == trained.digest(), "of what the trainer makes of the same"
            answers.append(await finish(engine, *(request(i, GREEDY) for i in range(4))))
        assert seen[0] == seen[2], "the same weights, bit for bit, whatever was loaded between"
        assert answers[0] == answers[2]
        assert len(set(digests)) == 2
        assert sum(seen[0][name] != seen[1][name] for name in seen[0]) >= 8, "of two layers each"
        right = trained.digest()
        with monkeypatch.context() as wrong:  # in this process; vLLM's own merges by what it is told here
            wrong.setattr(merging.Merged, "scale", property(lambda self: 0.5 * self.adapter[2]))
            assert right not in {await engine.load(2, trained.merged_by_engine(), summed=True), b""}, (
                "wrongly merged"
            )
        assert await engine.load(2, kind.views) == b"", "nobody asked"
        assert seen[4] != seen[0], "adapters change something"
        with pytest.raises(EngineError, match="is of base"):
            trained.merged_by_engine(_version(1, {"w": torch.zeros(2)})[0])
        await engine.close()

    kind.run(main())
