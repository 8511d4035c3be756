"""What a trainer of others shows to the daemon: how an engine is built, and its weights as bytes. Both TRL examples use it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from scavenger.config import RunConfig
from scavenger.protocol import messages
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.memory import Buffer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def engine_spec(config: RunConfig) -> messages.EngineSpec:
    """What an engine is built from; weights come through `publish`."""
    engine, model = config.engine, config.model
    return messages.EngineSpec(
        engine.name,
        (model.path / "config.json").read_text(),
        "bfloat16" if torch.cuda.is_available() else "float32",
        engine.max_batch,
        model.context_length,
        engine.pace,
        engine.gpu_memory_share,
        engine.eager,
    )


def pack_weights(
    parameters: Mapping[str, torch.Tensor], version: int, dtype: str, tokenizer: bytes
) -> tuple[manifests.Manifest, Buffer]:
    """The manifest and the bytes of a model's parameters, tied ones once; and its tokenizer.json, which engines need for stop texts."""
    shapes = {name: (dtype, tuple(value.shape)) for name, value in parameters.items()}
    beside = {files.TOKENIZER: (files.DTYPE, (len(tokenizer),))} if tokenizer else {}
    table = manifests.layout({**shapes, **beside})
    buffer = Buffer(sum(tensor.nbytes for tensor in table))
    for tensor in table:
        if files.is_file(tensor.name):
            buffer.view[tensor.offset : tensor.offset + tensor.nbytes] = tokenizer
            continue
        value = parameters[tensor.name].detach().to(DTYPES[dtype]).cpu().contiguous()
        buffer.view[tensor.offset : tensor.offset + tensor.nbytes] = memoryview(
            value.view(-1).view(torch.uint8).numpy()
        )
    size = manifests.chunk_nbytes_of(buffer.nbytes)
    return manifests.seal(version, table, manifests.hashes_of(buffer.view, size), chunk_nbytes=size), buffer
