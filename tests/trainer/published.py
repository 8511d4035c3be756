"""What a learner publishes, without a network; and the same gathered whole, tensor by tensor, which is what it must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from scavenger import wire
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from trainer.model import Learner
from trainer.publish import DTYPES, Publisher


class Kept:
    """Stands for a source: keeps what it is given."""

    def __init__(self) -> None:
        self.buffers: dict[int, Buffer] = {}

    def publish(self, manifest: Manifest, blob: Buffer, chunks: Sequence[int] | None = None) -> wire.WeightSource:
        self.buffers[manifest.version] = blob
        return wire.WeightSource("kept", "", b"")


def build_version(version: int, learner: Learner, dtype: str) -> tuple[Manifest, Buffer]:
    """Of a learner that is alone."""
    kept = Kept()
    publisher = Publisher(kept)
    manifest = publisher.seal(version, [publisher.make(learner, dtype)])
    publisher.offer(manifest, "", 0, 1)
    return manifest, kept.buffers[version]


def whole(learner: Learner) -> dict[str, Tensor]:
    """Every published tensor whole; a collective."""
    found = {}
    parameters = dict(learner.model.named_parameters())
    for name in sorted(learner.shapes()):
        layer, _, kind = name.rpartition(".")
        value = parameters.get(name, parameters.get(f"{layer}.base_layer.{kind}"))
        assert value is not None
        full = _full(value)
        if f"{layer}.base_layer.{kind}" in parameters:
            up, down = (_full(parameters[f"{layer}.lora_{side}.default.weight"]) for side in "BA")
            full = full + learner.model.get_submodule(layer).scaling["default"] * (up @ down)
        found[name] = full
    return found


def gathered(version: int, learner: Learner, dtype: str) -> tuple[Manifest, memoryview]:
    """What rank 0 would publish had it all of the weights; a collective."""
    tensors = {}
    for name, value in whole(learner).items():
        raw = value.to(DTYPES[dtype]).cpu().contiguous()
        tensors[name] = (dtype, tuple(value.shape), memoryview(raw.view(-1).view(torch.uint8).numpy()))
    return manifests.build(version, tensors)


def _full(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
