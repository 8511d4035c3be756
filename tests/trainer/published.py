"""What a learner publishes, without a network; and the same gathered whole, tensor by tensor, which is what it must equal."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollout.engines import checksum, lora
from scavenger.protocol import messages
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from trainer.loop.publish import DTYPES, Publisher
from trainer.model.learner import Learner


class Kept:
    """Stands for a source: keeps what it is given."""

    def __init__(self) -> None:
        self.buffers: dict[int, Buffer] = {}

    def publish(
        self, manifest: Manifest, blob: Buffer, chunks: Sequence[int] | None = None
    ) -> messages.WeightSource:
        self.buffers[manifest.version] = blob
        return messages.WeightSource("kept", "", b"")


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
    for name in sorted(learner.shapes(base=True)):
        layer, _, kind = name.rpartition(".")
        value = parameters.get(name, parameters.get(f"{layer}.base_layer.{kind}"))
        assert value is not None
        full = _full(value)
        if f"{layer}.base_layer.{kind}" in parameters:
            up, down = (_full(parameters[f"{layer}.lora_{side}.default.weight"]) for side in "BA")
            full = lora.merged(full, down, up, learner.model.get_submodule(layer).scaling["default"])
        found[name] = full
    return found


def gathered(
    version: int, learner: Learner, dtype: str, base: bytes = b"", tokenizer: bytes = b""
) -> tuple[Manifest, memoryview]:
    """What rank 0 would publish had it all of the weights; a collective. `base`: its root, of adapters."""
    beside = {files.TOKENIZER: (files.DTYPE, (len(tokenizer),), memoryview(tokenizer))} if tokenizer else {}
    if not learner.adapter_scale:
        return manifests.build(
            version, {name: _entry(value, dtype) for name, value in whole(learner).items()} | beside
        )
    parameters = {name: _full(value) for name, value in learner.model.named_parameters()}
    if not base:
        pristine = {
            name.replace(".base_layer", ""): value
            for name, value in parameters.items()
            if ".lora_" not in name
        }
        return manifests.build(
            version, {name: _entry(value, learner.base_dtype) for name, value in pristine.items()} | beside
        )
    trained = {name.replace(".default", ""): value for name, value in parameters.items() if ".lora_" in name}
    adapter = manifests.Adapter(base, learner.adapter_scale, dtype)
    return manifests.build(
        version, {name: _entry(value, "float32") for name, value in trained.items()}, adapter=adapter
    )


def digest_of(learner: Learner, dtype: str) -> bytes:
    """What engines are to hold of adapters and base, as rank 0 would state it had it all of the weights; a collective."""
    return checksum.digest(
        {name: checksum.checksum(value.to(DTYPES[dtype])) for name, value in whole(learner).items()}
    )


def _entry(value: Tensor, dtype: str) -> tuple[str, tuple[int, ...], memoryview]:
    raw = value.to(DTYPES[dtype]).cpu().contiguous()
    return dtype, tuple(value.shape), raw.view(-1).view(torch.uint8).numpy().data


def _full(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def larger_than_memory(folder: Path) -> int:
    """A model.safetensors of one bfloat16 tensor `large`, [rows, 4096], twice as large as the host's memory; its rows. Sparse: it takes no
    disk."""
    rows = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * 4096)
    nbytes = rows * 4096 * 2
    text = json.dumps(
        {"large": {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [0, nbytes]}}
    ).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + nbytes)
    return rows
